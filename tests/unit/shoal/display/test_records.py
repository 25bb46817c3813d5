"""JSON records, which are a contract with scripts: their fields, and that they are valid JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shoal import errors
from shoal._display import group_records, records
from shoal.checkpoints import Checkpoint
from shoal.events import CheckpointEnded, EvaluationEnded, LogLine, MetricsReported, StateChanged
from shoal.job import Job
from shoal.status import (
    ClusterStatus,
    DataAccount,
    DataCount,
    Evaluation,
    GroupStatus,
    GroupTimings,
    HeldRange,
    JobResult,
    JobState,
    JobStatus,
    MemberStatus,
    Progress,
    RankStatus,
    RankTimes,
    Role,
    SavedCheckpoint,
    StageTimes,
    StepTiming,
    StragglerRank,
    Timings,
)

PROGRESS = (
    "steps samples total_samples epoch samples_per_s loss staleness_p50 staleness_max rejected dropped earlier_steps "
    "lost_steps "
    "ended seconds_left"
)
EVALUATION = "number step values samples seconds time"
COUNT = "done leased requeued unleased"
LOAD = "updates received_bytes sent_bytes waiting_pulls"
MEMBER = "member role state incarnation address device metrics_address alive silent_s shards bytes job load draining"
MEMBER += " moving_groups waiting_jobs drained ended_jobs zone"
RANK = "seconds steps calls local_reduce wait transfer stage bubble"
STAGE = RankTimes(stage=StageTimes(0, 2, 4))
GROUP = GroupStatus("g", size=1, straggler=StragglerRank(0, 0.1), members=(RankStatus(0, "h:1", STAGE),))
TIMING = "step began pull read compute push wait evaluate own"
EVALUATED = Evaluation(1, 2, {"accuracy": 0.5})
REPORTED = MetricsReported(1, 0.0, "w0", 1, {"loss": 1.0}, Progress())
SAVED = SavedCheckpoint(1, 2, 3, 4.0)
JOB = JobStatus(Job("m:f", name="a"), JobState.RUNNING, evaluation=EVALUATED, best=EVALUATED, checkpoint=SAVED)
SERVER = MemberStatus("s0", Role.SERVER, 1, "h:1", "", "h:2", True, 0.1, 2, 64, "")
ACCOUNT = DataAccount(8, 1, 0, DataCount(1, 2, 3, 2), {0: DataCount(1, 2, 3, 2)}, (HeldRange("w0", 0, 0, 1, 3),))
STORED = Checkpoint("a", 1, 2.0, 3, 4, 5, {"w": ((2, 3), "float32")}, ("a/2",), EVALUATED)
DAMAGED = errors.CorruptCheckpoint("torn", checkpoint="a/7")


def timings() -> Timings:
    steps = {
        worker: tuple(StepTiming(number, float(number), compute=seconds) for number in range(10))
        for worker, seconds in (("w0", 0.1), ("w1", 0.5))
    }
    return Timings(steps, {0: 1}, groups={"w0": GroupTimings((RankTimes(),))})


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (records.progress(Progress()), PROGRESS),
        (records.evaluation(EVALUATED), EVALUATION),
        (records.checkpoint(SAVED), "number step bytes time"),
        (
            records.stored_checkpoint(STORED),
            "job number created_at step version bytes variables skipped evaluation",
        ),
        (
            records.stored_checkpoint(STORED, variables=False),
            "job number created_at step version bytes skipped evaluation",
        ),
        (records.damaged_checkpoint(DAMAGED), "job number error"),
        (records.data("a", ACCOUNT), "name samples epochs epoch total in_progress held"),
        (records.data("a", ACCOUNT)["total"], COUNT),
        (records.data("a", ACCOUNT)["in_progress"][0], f"epoch {COUNT}"),
        (records.data("a", ACCOUNT)["held"][0], "worker rank epoch start stop"),
        (records.metrics("a", [REPORTED], {}), "name workers"),
        (records.metrics("a", [REPORTED], {})["workers"][0], "worker rank state step time values"),
        (records.timings("a", timings()), "name straggler workers staleness"),
        (records.timings("a", timings())["straggler"], "worker ratio seconds phase"),
        (records.timings("a", timings())["workers"][0], "worker typical slowest steps group"),
        (records.timings("a", timings())["workers"][0]["group"], "straggler bubble ranks"),
        (records.timings("a", timings())["workers"][0]["group"]["ranks"][0], f"rank {RANK}"),
        (
            group_records.group(GROUP),
            "name submitter generation size most_ranks min_ranks waits_for straggler bubble ranks",
        ),
        (group_records.group(GROUP)["ranks"][0], f"rank address {RANK}"),
        (group_records.group(GROUP)["straggler"], "rank seconds"),
        (group_records.group(GROUP)["bubble"], "measured stages micro_batches ideal"),
        (group_records.group(GROUP)["ranks"][0]["stage"], "stage stages micro_batches seconds wait"),
        (records.timings("a", timings())["workers"][0]["steps"][0], TIMING),
        (records.member(SERVER), MEMBER),
        (records.member(SERVER)["load"], LOAD),
        (
            records.cluster(ClusterStatus("reef", 1, (SERVER,))),
            "cluster generation heartbeat_interval_s shards bytes members",
        ),
        (
            records.job(JOB),
            "name state reason program workers_wanted min_workers max_workers consistency optimizer settings epochs "
            "batch_size range_size max_steps step_timeout_s shards replicas min_replicas seed wire_dtype overlap "
            "workers submitted_at started_at finished_at progress checkpoint checkpoint_failure restarts copies "
            "failovers restart_point restore_note evaluation best",
        ),
        (
            records.result(JobResult("a", Progress(), 1.0, EVALUATED, EVALUATED)),
            "name state reason seconds progress evaluation best",
        ),
        (records.event(StateChanged(1, 0.0, JobState.RUNNING, "")), "event sequence time state reason"),
        (
            records.event(REPORTED),
            "event sequence time worker step values progress",
        ),
        (
            records.event(CheckpointEnded(1, 0.0, 1, SAVED, 1.0, "")),
            "event sequence time attempt saved seconds failure",
        ),
        (records.event(EvaluationEnded(1, 0.0, "w0", EVALUATED, True)), "event sequence time worker result best"),
        (records.event(LogLine(1, 0.0, "w0", "x")), "event sequence time worker text"),
    ],
)
def test_fields(record: dict[str, Any], fields: str) -> None:
    assert list(record) == fields.split()
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize(("interval_s", "state"), [(0.0, "late"), (0.5, "late"), (2.5, "alive")])
def test_a_member_is_late_by_the_interval_that_members_are_told(interval_s: float, state: str) -> None:
    silent = replace(SERVER, silent_s=4.0)
    record = records.cluster(ClusterStatus("reef", 1, (silent,), interval_s))
    assert record["members"][0]["state"] == state


def test_damaged_checkpoint_shows_its_error() -> None:
    record = records.damaged_checkpoint(DAMAGED)
    assert (record["job"], record["number"]) == ("a", 7)
    assert record["error"] == {"code": "CORRUPT_CHECKPOINT", "message": "torn", "details": {"checkpoint": "a/7"}}


def test_nothing_evaluated() -> None:
    assert records.evaluation(None) is None


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "alive"),
        ({"silent_s": 1.2}, "late"),
        ({"draining": True}, "draining"),
        ({"draining": True, "silent_s": 1.2}, "late"),
        ({"draining": True, "alive": False}, "left"),
        ({"alive": False, "silent_s": 9.0}, "lost"),
    ],
)
def test_one_word_for_each_state_of_a_member(fields: dict[str, Any], state: str) -> None:
    member = replace(SERVER, **fields)
    assert records.member_state(member, late_s=1.0) == records.member(member, 1.0)["state"] == state

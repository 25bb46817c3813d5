"""The coordinator's services over real gRPC on loopback, with parameter servers that only record calls."""

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import pytest

import shoal
from shoal import _rpc, errors
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._rpc.coordinator import CoordinatorClient
from shoal._rpc.membership import MembershipClient
from shoal._security import Authorizer, Credentials
from shoal._wire import Placement
from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.consistency import Synchronous
from shoal.events import StateChanged, watch
from shoal.initializers import Given
from shoal.job import Job
from shoal.status import (
    BrokenReplica,
    DataAccount,
    DataCount,
    GroupStatus,
    GroupTimings,
    HeldRange,
    JobState,
    MemberStatus,
    RankStatus,
    RankTimes,
    ServerLoad,
    StageTimes,
    StepTiming,
    Timings,
    UndeliveredNorm,
)
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import group_pb2 as groups
from shoal.v1 import job_pb2 as jobs
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import token_pb2
from shoal.variables import Variable
from shoal_coordinator.effects import server_calls
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from support.clusters.coordinator_rig import MAX_WATCHERS, Rig, job
from support.waiting import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.stop()


def test_a_jobs_whole_life(group: Rig) -> None:
    spec = job(settings={"hidden": 8}, batch_size=8, range_size=32)
    assert group.submit(spec).state == jobs.STARTING
    assignment = group.beat("w0")
    assert assignment.job == "a"
    assert assignment.assignment > 0
    group.describe("a", "w0")
    group.describe("a", "w1")
    wait_until(lambda: group.job("Join", job="a", worker="w0").HasField("placement"))
    assert group.state("a") is JobState.PLACING
    group.job("Join", job="a", worker="w1")
    joined = group.join("a", "w0")
    assert (joined.rank, joined.step, joined.state) == (0, 5, jobs.RUNNING), "the furthest of all servers' steps"
    assert Job.from_proto(joined.spec) == spec
    placement = group.job("GetPlacement", job="a")
    assert {shard.server for shard in placement.shards} <= {"s0", "s1"}

    leased = group.job("Lease", job="a", worker="w0").range
    assert (leased.lease, leased.epoch, leased.start, leased.stop) == (1, 0, 0, 32)
    assert group.job("Lease", job="a", worker="w1").range.start == 32
    assert group.job("Lease", job="a", worker="w0", done=1).wait
    assert group.job("Lease", job="a", worker="w1", done=2).finished
    report = group.job(
        "Report",
        job="a",
        worker="w0",
        step=4,
        accepted=4,
        samples=32,
        values={"loss": 0.5},
        staleness={1: 4},
        log=["hi"],
    )
    assert not report.done
    group.job("Finish", job="a", worker="w0")
    group.job("Finish", job="a", worker="w1")
    status = group.job("Get", job="a").status
    assert (status.state, status.progress.steps, status.progress.staleness_max) == (jobs.SUCCEEDED, 4, 1)
    assert list(status.workers) == ["w0", "w1"]
    seen = [type(event).__name__ for event in watch(group.client, "a")]
    assert seen.count("LogLine") == 1
    assert seen[-1] == "StateChanged"


def test_calls_to_servers_are_made_in_order(group: Rig) -> None:
    group.run(job(workers=1), "w0")
    group.job("Finish", job="a", worker="w0")
    group.job("Drop", job="a")
    wait_until(lambda: all(notes.of(pb.DropShardsRequest) for notes in group.notes.values()))
    for notes in group.notes.values():
        kinds = [type(call).__name__.removesuffix("Request") for call in notes.calls]
        assert kinds == ["CreateShards", "AdmitWorkers", "FenceWorkers", "ReleaseWorkers", "DropShards"]
        [request] = notes.of(pb.ReleaseWorkersRequest)
        [release] = request.workers
        assert (release.incarnation, release.committed_steps) == (group.lives["w0"], 5)


def test_a_known_placement_is_answered_without_its_layouts(group: Rig) -> None:
    group.run(job(workers=1, shards=3), "w0")
    whole = group.job("GetPlacement", job="a")
    slim = group.job("GetPlacement", job="a", known_generation=whole.generation)
    assert [shard.HasField("group") for shard in slim.shards] == [True] * len(whole.shards)
    known = Placement.from_proto(whole)
    assert known.renewed(slim) is known
    assert not slim.variables
    assert not any(shard.layout.arenas for shard in slim.shards)
    assert group.job("GetPlacement", job="a", known_generation=whole.generation + 1) == whole


def test_only_its_own_shards_are_created_on_a_server(group: Rig) -> None:
    group.run(job(workers=1, shards=3), "w0")
    created = {name: notes.of(pb.CreateShardsRequest) for name, notes in group.notes.items()}
    placement = group.job("GetPlacement", job="a")
    for shard in placement.shards:
        [request] = created[shard.server]
        assert shard.layout in list(request.shards)
        assert (request.job, request.generation, request.seed) == ("a", placement.generation, 0)


def test_a_silent_worker_is_declared_lost_and_replaced(group: Rig) -> None:
    group.run(job(), "w0", "w1")
    leased = group.job("Lease", job="a", worker="w1").range
    group.register(members.WORKER, "w2", device="cpu")
    group.silent.add("w1")
    wait_until(lambda: group.beat("w2").job == "a", what="the replacement")
    assert not group.member_status()["w1"].alive
    group.describe("a", "w2")
    assert group.join("a", "w2").rank == 1
    again = group.job("Lease", job="a", worker="w2").range
    assert (again.epoch, again.start, again.stop) == (leased.epoch, leased.start, leased.stop)
    with pytest.raises(errors.Fenced):
        group.beat("w1")
    with pytest.raises(errors.Fenced):
        group.job("Lease", job="a", worker="w1")


def test_a_dead_server_fails_its_jobs(group: Rig) -> None:
    group.run(job(workers=1), "w0")
    shard = group.job("GetPlacement", job="a").shards[0]
    group.silent.add(shard.server)
    wait_until(lambda: group.state("a") is JobState.FAILED)
    assert f"server {shard.server} is lost" in group.job("Get", job="a").status.reason


def test_a_server_that_refuses_fails_the_job_and_nothing_else(group: Rig) -> None:
    for notes in group.notes.values():
        notes.fails["CreateShards"] = errors.Overloaded("no memory for 1 GiB")
    group.submit(job(workers=1))
    group.describe("a", "w0")
    wait_until(lambda: group.state("a") is JobState.FAILED)
    assert "its shards could not be created: no memory for 1 GiB" in group.job("Get", job="a").status.reason
    for notes in group.notes.values():
        notes.fails.clear()
    group.run(job("b", workers=1), "w0")


def test_an_unreachable_server_is_tried_again_for_a_while(group: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "RETRY_FOR_S", 0.3)
    for server in group.servers:
        server.stop(0.1)
    group.submit(job(workers=1))
    group.describe("a", "w0")
    wait_until(lambda: group.state("a") is JobState.FAILED)
    assert "did not answer within 0.3 s" in group.job("Get", job="a").status.reason


def test_an_assignment_has_the_submitter_of_its_job(group: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    group.submit(job("a", workers=1))
    monkeypatch.setattr("shoal_coordinator.api.submission.submitter_of", lambda _: "alice")
    group.submit(job("b", workers=1))
    beats = [group.beat(worker) for worker in ("w0", "w1")]
    assert {(beat.job, beat.submitter) for beat in beats} == {("a", "ipv4:127.0.0.1"), ("b", "alice")}


# Refusals: every code that the contract names.


def test_refused_registrations(rig: Rig) -> None:
    rig.register(members.WORKER, "w0")
    with pytest.raises(errors.DuplicateMember, match="give each process its own"):
        rig.register(members.WORKER, "w0", process="other")
    wrong: list[tuple[Any, str]] = [(members.WORKER, "W"), (0, "w1"), (99, "w1")]
    for role, name in wrong:
        with pytest.raises(errors.BadRequest):
            rig.register(role, name)
    with pytest.raises(errors.BadRequest, match="no address"):
        rig.register(members.SERVER, "s9")


def test_member_of_another_version_is_refused_with_both_versions(rig: Rig) -> None:
    with pytest.raises(
        errors.WrongVersion, match=rf"w0 runs Shoal 0\.0\.7, but this coordinator runs {shoal.__version__}: "
    ):
        rig.register(members.WORKER, "w0", version="0.0.7")
    assert "w0" not in rig.member_status()
    rig.register(members.WORKER, "w1", version=shoal.__version__)
    rig.register(members.WORKER, "w2")
    assert {"w1", "w2"} <= rig.member_status().keys()


def test_a_member_says_its_version(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal._rpc.membership.version", lambda _: "0.0.7")
    request = members.RegisterRequest(role=members.SESSION, member="notebook")
    with pytest.raises(errors.WrongVersion), MembershipClient(rig.client, request) as member:
        member.start()


def test_a_role_without_insecure_joins_no_cluster_without_tokens(rig: Rig) -> None:
    """All users of the machine could call it, and nothing would say so."""
    closed, authorizer = Credentials(closed=True), Authorizer()
    request = members.RegisterRequest(role=members.SERVER, member="closed", address="10.0.0.1:7070")
    with (
        closing(_rpc.CoordinatorClient(rig.process.address, credentials=closed)) as client,
        pytest.raises(errors.StartFailed, match=r"asks for no tokens.*or give --insecure .* to the server, too"),
    ):
        MembershipClient(client, request, authorizer=authorizer).start()
    assert not authorizer.is_open
    assert not rig.member_status()["closed"].alive


def test_what_a_cluster_was_started_without_is_not_configured(rig: Rig) -> None:
    tokens = rig.client.tokens
    for method, request, option in (
        (tokens.CreateToken, token_pb2.CreateTokenRequest(name="ann", role="reader", valid_s=60), "--insecure"),
        (tokens.GetLoginLink, token_pb2.GetLoginLinkRequest(), "--page-listen"),
    ):
        with pytest.raises(errors.NotConfigured, match=option):
            rig.client.call(method, request)


@pytest.mark.parametrize("role", [members.SERVER, members.WORKER], ids=["server", "worker"])
def test_second_member_of_a_name_is_refused_with_the_first_ones_address(rig: Rig, role: members.Role.ValueType) -> None:
    """The second member waits, as the first may be its earlier incarnation. It gives up because heartbeats continue."""

    def member(address: str) -> MembershipClient:
        request = members.RegisterRequest(role=role, member="twin", address=address)
        return MembershipClient(rig.client, request)

    with member("10.0.0.1:7070") as first:
        first.start()
        life = first.incarnation
        with pytest.raises(
            errors.DuplicateMember,
            match=r"process at 10\.0\.0\.1:7070 has the member id twin: give each process its own id, or stop that one",
        ) as refused:
            member("10.0.0.2:7070").start()
        assert refused.value.details["address"] == "10.0.0.1:7070"
        found = rig.member_status()["twin"]
        assert (found.alive, found.incarnation, found.address) == (True, life, "10.0.0.1:7070")


def test_a_worker_leaves_at_once(group: Rig) -> None:
    group.silent.add("w0")
    request = members.LeaveRequest(member="w0", incarnation=group.lives["w0"])
    group.client.call(group.client.members.Leave, request)
    group.client.call(group.client.members.Leave, request)
    assert not group.member_status()["w0"].alive
    with pytest.raises(errors.Fenced):
        group.beat("w0")


def test_data_account_shows_ranges_returned_by_a_worker_that_leaves(group: Rig) -> None:
    group.submit(job(batch_size=8, range_size=32))
    assert DataAccount.from_proto(group.job("GetData", job="a")) == DataAccount(), "nothing is known of it yet"
    for worker in ("w0", "w1"):
        group.describe("a", worker, samples=100)
    wait_until(lambda: group.job("Join", job="a", worker="w0").HasField("placement"))
    group.job("Join", job="a", worker="w1")
    group.join("a", "w0")
    leased = group.job("Lease", job="a", worker="w1").range
    account = DataAccount.from_proto(group.job("GetData", job="a"))
    assert account.total == DataCount(done=0, leased=32, requeued=32, unleased=36)
    assert account.held == (HeldRange("w1", 1, 0, 32, 64),)
    group.silent.add("w1")
    cursor = pb.DataCursor(lease=leased.lease, consumed=24)
    for _ in range(2):  # a repeat changes nothing
        request = members.LeaveRequest(member="w1", incarnation=group.lives["w1"], cursor=cursor)
        group.client.call(group.client.members.Leave, request)
    account = DataAccount.from_proto(group.job("GetData", job="a"))
    assert account.in_progress == {0: DataCount(done=24, leased=0, requeued=40, unleased=36)}
    assert account.held == ()


def test_refused_jobs(group: Rig) -> None:
    group.submit(job())
    with pytest.raises(errors.JobExists, match="choose another name"):
        group.submit(job())
    message = job("b").to_proto()
    message.consistency.CopyFrom(Synchronous(backup_workers=2).to_proto())
    with pytest.raises(errors.InvalidJob, match="backup workers"):
        group.job("Submit", spec=message)
    message = job("b").to_proto()
    message.optimizer.name = "lion"
    with pytest.raises(errors.InvalidOptimizer):
        group.job("Submit", spec=message)
    with pytest.raises(errors.JobRunning):
        group.job("Drop", job="a")
    with pytest.raises(errors.NotPlaced):
        group.job("GetPlacement", job="a")


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "a&b", 'a"b', "../a", "a/b", "A", "1a", "a\n", "\u0430", "a" * 64]
)
def test_job_name_is_checked_for_every_client(group: Rig, name: str) -> None:
    """The name is in URLs, on the page, in logs and in paths of checkpoints. Our own clients send no invalid name."""
    message = job("a").to_proto()
    message.name = name
    with pytest.raises(errors.InvalidJob, match=r"is not 1 to 63 characters of a-z, 0-9 and -, ") as refused:
        group.job("Submit", spec=message)
    assert repr(name) in refused.value.message
    assert not group.job("List").jobs


def test_a_cluster_without_a_folder_of_checkpoints_says_so(group: Rig) -> None:
    for wish in ({"restore": "b"}, {"checkpoints": CheckpointPolicy()}):
        with pytest.raises(errors.InvalidJob, match="start its coordinator and its servers with --checkpoints"):
            group.submit(job(**wish))
    group.submit(job(checkpoints=NEVER))
    with pytest.raises(errors.StorageFailed, match="start its coordinator and its servers with --checkpoints"):
        group.job("TakeCheckpoint", job="a")


def test_a_checkpoint_to_begin_with_is_looked_for_before_the_job_is_taken(tmp_path: Path) -> None:
    catalogue = Catalogue(LocalStorage(tmp_path))
    for number in (1, 3):
        catalogue.publish(Manifest("base", number, 0.0, 1, 1, {}, (), ()))
    (tmp_path / "torn" / "00000001").mkdir(parents=True)
    rig = Rig(checkpoints=str(tmp_path))
    try:
        for source in ("nosuch", "base/7", "torn", "torn/1"):
            with pytest.raises(
                errors.UnknownCheckpoint, match=f"there is no checkpoint {source} in {tmp_path}; `shoal"
            ):
                rig.submit(job(restore=source))
        assert not rig.job("List").jobs
        rig.submit(job("newest", restore="base"))
        spec = job("third", restore="base/3").to_proto()
        first = rig.job("Submit", spec=spec, token="t").status
        catalogue.remove("base", 3)
        assert rig.job("Submit", spec=spec, token="t").status == first, "a repeat is answered as the first was"
        with pytest.raises(errors.JobExists):
            rig.submit(job("third", restore="base/3"))
        rig.job("Cancel", job="third")
        with pytest.raises(errors.UnknownCheckpoint):
            rig.submit(job("third", restore="base/3"))
    finally:
        rig.stop()


def test_storage_that_is_away_for_a_moment_refuses_no_job(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    rig = Rig(checkpoints=str(folder))
    try:
        folder.rmdir()
        folder.symlink_to(folder)
        assert rig.submit(job(restore="base")).state == jobs.PENDING
    finally:
        rig.stop()


@pytest.mark.parametrize("method", ["Get", "GetData", "Cancel", "Drop", "GetPlacement", "GetTimings", "TakeCheckpoint"])
def test_unknown_jobs(rig: Rig, method: str) -> None:
    with pytest.raises(errors.UnknownJob, match="'nope'"):
        rig.job(method, job="nope")


@pytest.mark.parametrize("method", ["Describe", "Join", "Lease", "Report", "Finish"])
def test_workers_of_unknown_jobs_and_fenced_workers(group: Rig, method: str) -> None:
    with pytest.raises(errors.UnknownJob):
        group.job(method, job="nope", worker="w0")
    group.submit(job())
    with pytest.raises(errors.Fenced):
        group.job(method, job="a", worker="w0", incarnation=99)


def test_a_description_that_conflicts(group: Rig) -> None:
    group.submit(job())
    group.describe("a", "w0")
    with pytest.raises(errors.InvalidJob, match="63 samples instead of 64"):
        group.describe("a", "w1", samples=63)
    assert group.state("a") is JobState.FAILED
    with pytest.raises(errors.JobFailed):
        group.describe("a", "w0")


def test_descriptions_that_make_no_sense(group: Rig) -> None:
    group.submit(job())
    variable = Variable(2).to_proto("w")
    with pytest.raises(errors.InvalidVariable, match="twice"):
        group.job("Describe", job="a", worker="w0", variables=[variable, variable])
    with pytest.raises(errors.InvalidJob, match="define at least one"):
        group.job("Describe", job="a", worker="w0")
    variable.ClearField("dtype")
    with pytest.raises(errors.InvalidVariable):
        group.job("Describe", job="a", worker="w0", variables=[variable])
    with pytest.raises(errors.LimitExceeded, match="the limit MAX_SAMPLES is"):
        group.describe("a", "w0", samples=2**63)
    group.describe("a", "w0", {"w": Variable(4, initializer=Given())})


@pytest.mark.parametrize(
    "fields",
    [
        {"log": [""] * 1_001},
        {"log": ["é" * 5_000]},
        {"values": {f"v{number}": 0.0 for number in range(300)}},
        {"values": {"é" * 129: 0.0}},
        {"staleness": {1_025: 1}},
        {"staleness": {0: 2**53}},
        {"accepted": 2**53},
        {"rejected": 2**63},
        {"dropped": 2**64 - 1},
        {"samples": 2**64 - 1},
        {"timings": [jobs.StepTiming(step=step) for step in range(65)]},
        {"timings": [jobs.StepTiming(step=2), jobs.StepTiming(step=2)]},
        {"timings": [jobs.StepTiming(step=2), jobs.StepTiming(step=1)]},
        {"timings": [jobs.StepTiming(wait=-1.0)]},
        {"timings": [jobs.StepTiming(began=math.inf)]},
        {"timings": [jobs.StepTiming(compute=math.nan)]},
        {"ranks": [groups.RankTimes()] * 257},
        {"ranks": [groups.RankTimes(wait=-1.0)]},
        {"ranks": [groups.RankTimes(transfer=math.inf)]},
        {"ranks": [groups.RankTimes(calls=2**53)]},
        {"ranks": [groups.RankTimes(stage=groups.StageTimes(stages=2))]},  # no micro-batches
        {"ranks": [groups.RankTimes(stage=groups.StageTimes(stage=2, stages=2, micro_batches=1))]},
        {"ranks": [groups.RankTimes(stage=groups.StageTimes(stages=257, micro_batches=1))]},
        {"ranks": [groups.RankTimes(stage=groups.StageTimes(stages=2, micro_batches=1, wait=-1.0))]},
        {"ranks": [groups.RankTimes(stage=groups.StageTimes(stages=2, micro_batches=1, seconds=math.nan))]},
    ],
)
def test_reports_over_their_bounds(group: Rig, fields: dict[str, Any]) -> None:
    with pytest.raises(errors.BadRequest):
        group.job("Report", job="a", worker="w0", **fields)


def test_steps_are_bounded_and_the_error_names_the_limit(group: Rig) -> None:
    group.run(job(), "w0", "w1")
    for step in (2**53, 2**63, 2**64 - 1):
        for method, fields in (
            ("Report", {"step": step, "accepted": 1}),
            ("Report", {"timings": [jobs.StepTiming(step=3), jobs.StepTiming(step=step)]}),
            ("ClaimEvaluation", {"step": step}),
            ("ReportEvaluation", {"result": jobs.Evaluation(step=step, values={"loss": 1.0})}),
        ):
            with pytest.raises(errors.BadRequest, match=f"w0 .*job a has step {step}; the limit MAX_STEP is {2**53}"):
                group.job(method, job="a", worker="w0", **fields)
    assert group.job("Get", job="a").status.progress.steps == 0
    with pytest.raises(errors.BadRequest, match=f"w0 reports step {2**53 - 1} of job a.* MAX_LEAD"):
        group.job("Report", job="a", worker="w0", step=2**53 - 1, accepted=1)
    group.job("Report", job="a", worker="w0", step=1, accepted=1)
    assert group.job("Get", job="a").status.progress.steps == 1


def test_replies_state_the_interval_of_heartbeats(group: Rig) -> None:
    group.run(job(), "w0", "w1")
    replies = [group.beat("w0"), group.job("Report", job="a", worker="w0", step=1, accepted=1)]
    replies.append(group.client.call(group.client.members.GetStatus, members.GetStatusRequest()))
    assert [reply.heartbeat_interval_s for reply in replies] == [0.1] * 3


def test_where_the_time_of_steps_went(group: Rig) -> None:
    group.run(job(), "w0", "w1")
    assert Timings.from_proto(group.job("GetTimings", job="a")) == Timings()
    steps = tuple(StepTiming(step, 1_000.0 + step, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6) for step in range(65))
    before = time.time()
    for worker in ("w1", "w0"):
        for some in (steps[:1], steps[1:]):
            group.job("Report", job="a", worker=worker, timings=[step.to_proto() for step in some], staleness={2: 3})
    found = Timings.from_proto(group.job("GetTimings", job="a"))
    assert found.steps == {"w0": steps[1:], "w1": steps[1:]}
    assert found.staleness == {2: 6}
    assert all(abs(reported - before) < 60 for reported in found.last_reported_at.values()), (
        "by the coordinator's clock"
    )
    assert found.last_reported_at["w1"] < found.last_reported_at["w0"]
    assert Timings.from_proto(group.job("GetTimings", job="a", last=2)) == found.latest(2)
    assert Timings.from_proto(group.job("GetTimings", job="a", last=1_000)).steps == {"w0": steps, "w1": steps}
    group.job("Finish", job="a", worker="w0")
    assert Timings.from_proto(group.job("GetTimings", job="a")) == found, "who is gone is to be seen, too"
    ranks = (RankTimes(60.0, 50, 100, 0.5, 9.0, 1.0), RankTimes(60.0, 50, 100, 0.5, 1.0, 2.0))
    told = {"timings": [StepTiming(65, 1_065.0).to_proto()], "ranks": [it.to_proto() for it in ranks]}
    group.job("Report", job="a", worker="w1", **told)
    found = Timings.from_proto(group.job("GetTimings", job="a"))
    assert found.groups == {"w1": GroupTimings(ranks)}
    assert str(found.groups["w1"].straggler()).startswith("rank 1 is a straggler: the others wait 80 ms")


def test_an_elastic_group_shows_the_times_that_its_ranks_tell(group: Rig) -> None:
    with shoal.Client(group.process.address) as client:
        assert client.groups() == []
        own: dict[str, Any] = {"group": "g", "process_id": "p", "address": "h:1", "ranks": 1, "min_ranks": 1}
        stub = group.client.groups
        assert group.client.call(stub.Join, groups.JoinGroupRequest(**own)).generation == 1
        beat = {**own, "generation": 1, "rank": 0, "size": 1, "lost_rank": -1}
        for wrong in (groups.RankTimes(wait=-1.0), groups.RankTimes(seconds=math.nan), groups.RankTimes(steps=2**53)):
            with pytest.raises(errors.BadRequest, match="the heartbeat of 'p' has a"):
                group.client.call(stub.Heartbeat, groups.HeartbeatGroupRequest(**beat, times=wrong))
        times = RankTimes(60.0, 50, 100, 0.5, 9.0, 1.0, StageTimes(1, 2, 4, 50.0, 5.0))
        group.client.call(stub.Heartbeat, groups.HeartbeatGroupRequest(**beat, times=times.to_proto()))
        status = GroupStatus("g", client.groups()[0].submitter, 1, 1, 1, 1, members=(RankStatus(0, "h:1", times),))
        assert client.group("g") == status
        assert client.groups() == [replace(status, members=())]
        with pytest.raises(errors.UnknownGroup, match="no elastic group 'other'"):
            client.group("other")


def test_status_has_the_load_of_servers(group: Rig) -> None:
    norms = (UndeliveredNorm("a", 1, "s1", 5.5, "refused"),)
    load = ServerLoad(updates=5, received_bytes=1 << 40, sent_bytes=7, waiting_pulls=2, undelivered_norms=norms)
    load = replace(load, broken_replicas=(BrokenReplica("a", 1, 2, 3, primary=True, reason="reset"),))
    beat = members.HeartbeatRequest(member="s0", incarnation=group.lives["s0"], load=load.to_proto())
    group.client.call(group.client.members.Heartbeat, beat)
    found = group.member_status()
    assert MemberStatus.from_proto(found["s0"]).load == load
    assert MemberStatus.from_proto(found["s1"]).load == ServerLoad()
    assert not found["w0"].HasField("load")


@pytest.mark.parametrize(
    ("count", "age_s", "reason", "said"),
    [
        (33, 5.5, "", "33 undelivered norms; the limit UNDELIVERED_NORMS is 32"),
        (1, 5.5, "x" * 999, "FIELD_BYTES"),
        (1, 5.5, "\n", "control"),
        (1, math.nan, "", "an undelivered norm is nan s old; it must be finite"),
        (1, math.inf, "", "an undelivered norm is inf s old"),
        (1, -1.0, "", "an undelivered norm is -1.0 s old"),
    ],
)
def test_undelivered_norms_are_few_and_short(group: Rig, count: int, age_s: float, reason: str, said: str) -> None:
    load = ServerLoad(undelivered_norms=(UndeliveredNorm("a", 1, "s1", age_s, reason),) * count)
    beat = members.HeartbeatRequest(member="s0", incarnation=group.lives["s0"], load=load.to_proto())
    with pytest.raises((errors.BadRequest, errors.LimitExceeded), match=said):
        group.client.call(group.client.members.Heartbeat, beat)


@pytest.mark.parametrize(
    ("count", "reason", "said"),
    [
        (257, "", "257 broken replicas; the limit BROKEN_REPLICAS is 256"),
        (1, "x" * 999, "FIELD_BYTES"),
        (1, "\n", "control"),
    ],
)
def test_broken_replicas_are_few_and_short(group: Rig, count: int, reason: str, said: str) -> None:
    load = ServerLoad(broken_replicas=(BrokenReplica("a", 1, 0, 1, primary=True, reason=reason),) * count)
    beat = members.HeartbeatRequest(member="s0", incarnation=group.lives["s0"], load=load.to_proto())
    with pytest.raises((errors.BadRequest, errors.LimitExceeded), match=said):
        group.client.call(group.client.members.Heartbeat, beat)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([str(number) for number in range(257)], "w0 on job a has 257 values; the limit METRICS is 256"),
        (["x" * 257], "has a value named 'xxx.*; a name must be text of 1 to 256 bytes"),
        ([""], "has a value named ''"),
    ],
)
def test_evaluations_are_bounded_too(group: Rig, names: list[str], said: str) -> None:
    group.run(job(), "w0", "w1")
    with pytest.raises(errors.BadRequest, match=said):
        group.job("ReportEvaluation", job="a", worker="w0", result=jobs.Evaluation(values=dict.fromkeys(names, 1.0)))


def test_a_session_without_a_seat(rig: Rig) -> None:
    for name in ("x", "y"):
        rig.register(members.SESSION, name)
    rig.submit(Job(name="s"))
    rig.describe("s", "x")
    with pytest.raises(errors.Overloaded, match=r"job s is full.* becomes free [\d.]+ s later\.") as raised:
        rig.job("Join", job="s", worker="y")
    assert float(raised.value.details["free_after_s"]) > 0


def test_a_session_whose_connection_has_ended_gives_its_place_to_another_one(rig: Rig) -> None:
    rig.submit(Job(name="s"))
    client = CoordinatorClient(rig.process.address)
    life = client.register(members.RegisterRequest(role=members.SESSION, member="x", process="p")).incarnation
    rig.lives["x"] = life  # it sends heartbeats on another connection
    rig.describe("s", "x")
    attend = members.AttendRequest(member="x", incarnation=life)
    first, again = (it.open_call(it.members.Attend, attend) for it in (client, rig.client))
    rig.register(members.SESSION, "y")
    client.close()
    assert first.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(errors.Overloaded):  # it attends by another call
        rig.describe("s", "y")
    again.cancel()
    wait_until(lambda: is_admitted(rig, "s", "y"), what="the place")
    with pytest.raises(errors.Fenced):
        rig.beat("x")
    with pytest.raises(errors.Fenced):
        rig.client.call(rig.client.members.Attend, attend)


def is_admitted(rig: Rig, job: str, worker: str) -> bool:
    try:
        rig.describe(job, worker)
    except errors.Overloaded:
        return False
    return True


def test_a_worker_without_a_part(group: Rig) -> None:
    group.submit(job(workers=1))
    with pytest.raises(errors.Cancelled, match="no assignment"):
        group.job("Join", job="a", worker="w1")


def test_a_lease_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="less than half the timeout"):
        CoordinatorConfig(heartbeat_timeout_s=1.0, heartbeat_interval_s=0.5)


@pytest.mark.parametrize("seconds", [-1.0, 601.0, float("nan")])
def test_servers_are_not_waited_for_longer_than_the_dead_are_remembered(seconds: float) -> None:
    with pytest.raises(errors.BadRequest, match="it must be 0 to 600"):
        CoordinatorConfig(server_return_s=seconds)


def test_a_port_in_use(rig: Rig) -> None:
    with pytest.raises(errors.PortInUse):
        start_coordinator(CoordinatorConfig(listen=rig.process.address), prometheus_client.CollectorRegistry())


# Watching.


def test_watching_from_a_number_and_without_waiting(group: Rig) -> None:
    group.submit(job(workers=3))
    events = list(watch(group.client, "a", follow=False))
    assert [event.reason for event in events if isinstance(event, StateChanged)] == ["", "waiting for workers: 2 of 3"]
    assert list(watch(group.client, "a", after=1, follow=False)) == events[1:]
    assert list(watch(group.client, "a", after=99, follow=False)) == []
    with pytest.raises(errors.UnknownJob):
        list(watch(group.client, "nope"))


def test_events_come_as_they_happen_and_end_with_the_job(group: Rig) -> None:
    group.submit(job(workers=3))
    stream = watch(group.client, "a", timeout_s=20)
    assert [next(stream).sequence, next(stream).sequence] == [1, 2]
    group.job("Cancel", job="a")
    [last] = list(stream)
    assert isinstance(last, StateChanged)
    assert last.state is JobState.CANCELLED


def open_watch(rig: Rig) -> Any:
    call = rig.client.jobs.Watch(jobs.WatchRequest(job="a"), timeout=30)
    next(call)
    return call


def test_watchers_do_not_starve_other_calls_and_are_limited(group: Rig) -> None:
    group.submit(job(workers=3))
    calls = [open_watch(group) for _ in range(MAX_WATCHERS)]
    with pytest.raises(errors.Overloaded, match="try again later"), _rpc.as_shoal_errors("coordinator"):
        open_watch(group)
    for _ in range(20):  # on 4 threads; the watchers would hold 3
        group.beat("w0")
    assert group.registry.get_sample_value("shoal_coordinator_job_watchers") == MAX_WATCHERS
    calls[0].cancel()
    wait_until(lambda: group.registry.get_sample_value("shoal_coordinator_job_watchers") == MAX_WATCHERS - 1)
    open_watch(group).cancel()
    for call in calls:
        call.cancel()


def test_watchers_are_let_go_when_the_coordinator_stops(group: Rig) -> None:
    group.submit(job(workers=3))
    call = open_watch(group)
    group.process.stop()
    with pytest.raises(errors.Unreachable), _rpc.as_shoal_errors("coordinator"):
        list(call)


def test_metrics_tell_the_state(group: Rig) -> None:
    group.submit(job(workers=3))
    sample = group.registry.get_sample_value
    assert sample("shoal_coordinator_members", {"role": "worker", "state": "alive"}) == 2
    assert sample("shoal_coordinator_members", {"role": "server", "state": "lost"}) == 0
    assert sample("shoal_coordinator_jobs", {"state": "pending"}) == 1
    assert sample("shoal_coordinator_placement_generation") == 0
    assert sample("shoal_coordinator_events_total", {"event": "JobSubmitted"}) == 1
    with pytest.raises(errors.JobExists):
        group.submit(job())
    assert sample("shoal_coordinator_rejected_requests_total", {"code": "JOB_EXISTS"}) == 1


def test_metrics_tell_of_deaths_and_of_calls_made_again(group: Rig) -> None:
    sample = group.registry.get_sample_value
    group.submit(job())
    for notes in group.notes.values():
        notes.fails["CreateShards"] = errors.Unreachable("away")
    for worker in ("w0", "w1"):
        group.describe("a", worker)
    wait_until(lambda: (sample("shoal_coordinator_retries_total") or 0) >= 1, what="a second call")
    assert sample("shoal_coordinator_pending_effects", {"effect": "CreateShards"}) == 1
    for notes in group.notes.values():
        notes.fails.clear()
    wait_until(lambda: sample("shoal_coordinator_pending_effects", {"effect": "CreateShards"}) == 0)
    group.silent.add("w0")
    wait_until(lambda: sample("shoal_coordinator_members_lost_total", {"role": "worker"}) == 1, what="the death")
    assert sample("shoal_coordinator_members_lost_total", {"role": "server"}) == 0

"""Files that an earlier version of Shoal wrote, opened by this version: a metadata store, and checkpoints.

`tests/golden/make_earlier_files.py` wrote them, and describes their contents.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.storage_urls import open_storage
from shoal._rpc.coordinator import CoordinatorClient
from shoal._wire import Lease, NoRange
from shoal._wire.cursor import Cursor
from shoal.checkpoints import Checkpoints
from shoal.client import Client
from shoal.events import StateChanged
from shoal.status import JobState
from shoal.v1 import coordinator_pb2, job_pb2, state_pb2
from shoal_coordinator.persistence import ClusterRecords, open_store
from shoal_worker.batches import LeasedBatches
from support.clusters.shard_servers import ShardServers
from support.recordings.cluster_members import part_of, register_server, register_worker, report_of
from support.recordings.conversation import Call, load, shown
from support.recordings.mixed_variables import GIVEN, MIXED, MOMENTUM, TRAINED, updates, whole_numbers
from support.recordings.pinned_cluster import Clock, PinnedCoordinator, bare_servers
from support.recordings.raw_calls import make_calls

FILES = Path(__file__).parents[1] / "golden" / "earlier_files"
KNOWN = json.loads((FILES / "values.json").read_text())
NOW, VALUES = KNOWN["now"], KNOWN["values"]
LATER = 2_000_000_000.0
SAVED = ("done/1", "running/1", "running/2", "running/3")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Returns a copy of the files, which tests may write to."""
    return Path(shutil.copytree(FILES, tmp_path / "files"))


@pytest.fixture
def checkpoints(files: Path) -> Path:
    return files / "checkpoints"


@pytest.fixture
def started(files: Path, checkpoints: Path) -> Iterator[tuple[PinnedCoordinator, Clock]]:
    """Yields a coordinator on the store, and its clock."""
    clock = Clock(NOW)
    with PinnedCoordinator(str(files / "coordinator.db"), checkpoints, clock) as coordinator:
        yield coordinator, clock


def check_values(found: Mapping[str, np.ndarray], name: str) -> None:
    """Checks restored values. They are the servers' float32, but those of values.json were pulled, some in 16 bits."""
    assert found.keys() == VALUES[name].keys() == MIXED.keys()
    for key, value in found.items():
        assert value.shape == MIXED[key].shape
        pulled = value.astype(MIXED[key].dtype)
        np.testing.assert_array_equal(pulled.astype(np.float64), VALUES[name][key], err_msg=key)


class Numbers:
    """The samples of the job "running": each sample is its own number."""

    def __len__(self) -> int:
        return 64

    def batch(self, indices: np.ndarray) -> np.ndarray:
        return indices


def train_on_the_rest(batches: LeasedBatches) -> dict[int, list[int]]:
    """Returns the numbers of the samples of all further ranges, by epoch."""
    trained: dict[int, list[int]] = {0: [], 1: []}
    while batches.lease() is not NoRange.FINISHED:
        while batches.has_next:
            batch = batches.take()
            assert batch.place
            trained[batch.place[0]] += batch.data.tolist()
    batches.close()
    return trained


# What a job waits for, what today's coordinator adds for users, and what it stores.
WAITS, BUSY = "waiting for workers: 0 of 5", " (1 is alive, busy with running)"
STORED_WAIT = "waiting for workers"


def as_answered_now(call: Call) -> Call:
    """Returns the call with today's answer.

    Lists of jobs have no settings, a status has the heartbeat interval, and a job that waits says who is busy.
    """
    reply: job_pb2.ListReply | job_pb2.GetReply | coordinator_pb2.GetStatusReply
    if call.method.endswith("/List"):
        reply = job_pb2.ListReply.FromString(call.replies[0])
        for job in reply.jobs:
            job.spec.ClearField("settings_json")
            if job.reason == WAITS:
                job.reason += BUSY
    elif call.method.endswith("/GetStatus"):
        reply = coordinator_pb2.GetStatusReply.FromString(call.replies[0])
        reply.heartbeat_interval_s = 100.0  # of the pinned coordinator
    elif call.method.endswith("Jobs/Get"):
        reply = job_pb2.GetReply.FromString(call.replies[0])
        if reply.status.reason == WAITS:
            reply.status.reason += BUSY
    else:
        return call
    return replace(call, replies=(reply.SerializeToString(deterministic=True),))


def without_additions(call: Call) -> Call:
    """Returns the call with an answer as coordinators of then sent it: without members, and without new events."""
    if call.method.endswith("Jobs/Watch"):
        events = [(reply, job_pb2.Event.FromString(reply)) for reply in call.replies]
        return replace(call, replies=tuple(it for it, event in events if not event.state.reason.endswith(BUSY)))
    if not call.method.endswith("Jobs/Get"):
        return call
    reply = job_pb2.GetReply.FromString(call.replies[0])
    reply.status.ClearField("members")
    return replace(call, replies=(reply.SerializeToString(deterministic=True),))


def test_a_coordinator_answers_as_one_of_then_did(started: tuple[PinnedCoordinator, Clock]) -> None:
    coordinator, _ = started
    recorded = [entry for entry in load(FILES / "answers.jsonl") if isinstance(entry, Call)]
    answers = make_calls(coordinator.address, [(call.method, call.requests[0]) for call in recorded])
    for answer, expected in zip(map(without_additions, answers), map(as_answered_now, recorded), strict=True):
        assert answer == expected, f"{shown(answer)}\n\ninstead of\n\n{shown(expected)}"


def ranks_in(records: Mapping[str, bytes], job: str) -> dict[int, state_pb2.RankRecord]:
    """Returns the ranks of a job, such as job/1, which have no record in the store of an earlier version."""
    prefix = f"{job}/rank/"
    names = [key for key in records if key.startswith(prefix)]
    return {int(key.removeprefix(prefix)): state_pb2.RankRecord.FromString(records[key]) for key in names}


def ledger_as_written_then(key: str, known: Mapping[str, bytes]) -> bytes:
    """Returns a ledger with all ranges, which have records of their own in the stores of this version."""
    ledger, job = state_pb2.LedgerRecord.FromString(known[key]), key.removesuffix("/ledger")
    for name, record in sorted(known.items()):
        if name.startswith(f"{job}/lease/"):
            lease, worker = state_pb2.LeaseRecord.FromString(record), name.removeprefix(f"{job}/lease/")
            ledger.held[worker].CopyFrom(lease.range)
            ledger.ranks[worker] = lease.rank
        elif name.startswith(f"{job}/requeued/"):
            ledger.requeued.append(state_pb2.RequeuedRange.FromString(record))
    return ledger.SerializeToString(deterministic=True)


def tally_as_written_then(key: str, known: Mapping[str, bytes]) -> bytes:
    """Returns the totals of all workers, and the reports of the live ones in the same record."""
    tally = state_pb2.ProgressRecord.FromString(known[key])
    reports = state_pb2.ReportsRecord.FromString(known.get(key.replace("/tally", "/reports"), b"")).reports
    for assignment, report in reports.items():
        tally.told[assignment].CopyFrom(report)
        tally.totals.accepted += report.accepted
        tally.totals.samples += report.samples
        for staleness, count in report.staleness.items():
            tally.totals.staleness[staleness] += count
    return tally.SerializeToString(deterministic=True)


def as_written_then(key: str, known: Mapping[str, bytes]) -> bytes:
    """Returns a record as versions of then wrote it: without the fields that they did not have, and with the parts that
    have records of their own now.
    """
    if key.endswith("/ledger"):
        return ledger_as_written_then(key, known)
    if key.endswith("/tally"):
        return tally_as_written_then(key, known)
    record, ranks = known[key], ranks_in(known, key.removesuffix("/state"))
    if key.startswith("member/"):
        member = state_pb2.MemberRecord.FromString(record)
        member.ClearField("drained")
        return member.SerializeToString(deterministic=True)
    if not key.endswith("/state"):
        return record
    state = state_pb2.JobRecord.FromString(record)
    for rank, it in sorted(ranks.items()):
        state.worker_group[rank] = it.worker
        if it.HasField("member"):
            state.members.append(it.member)
        if it.finished:
            state.finished.append(rank)
    state.ClearField("trained_s")
    state.ClearField("training_since")
    if state.waiting_for == STORED_WAIT:  # the new text is an event, for which the coordinator reserved numbers
        state.waiting_for, state.reserved_sequence = WAITS, 10_001
    return state.SerializeToString(deterministic=True)


def test_a_coordinator_knows_every_record_as_it_was_written(files: Path, checkpoints: Path) -> None:
    """The coordinator would write the same records that it has read, so no field was lost or confused.

    Records of a job's state also have the time of training now, and those of servers whether they have drained.
    """
    with closing(open_store(str(files / "coordinator.db"))) as store:
        written = store.load()
    # Later than the times of the checkpoints, which come from the clock of the host that took them.
    rig = PinnedCoordinator(str(files / "coordinator.db"), checkpoints, Clock(LATER))
    with rig, rig.coordinator.reading() as (machine, _):
        known = ClusterRecords(machine).all()
    assert {key: as_written_then(key, known) for key in written} == written
    # Jobs that never ran have nothing to tell; their tallies are written with a worker that goes. The event is BUSY.
    new = {key for key in known.keys() - written.keys() if "/rank/" not in key}
    parts = {"job/5/lease/w0", "job/5/requeued/0/24", "job/5/reports"}
    assert new == {"job/3/tally", "job/4/tally", "job/4/event/10002", *parts}


def test_a_store_gets_the_records_of_this_version_when_it_is_opened(files: Path, checkpoints: Path) -> None:
    """A second restart finds the same state in them."""
    path, states = str(files / "coordinator.db"), []
    for _ in range(2):
        rig = PinnedCoordinator(path, checkpoints, Clock(LATER))
        with rig, rig.coordinator.reading() as (machine, _):
            job = machine.job("running")
            states.append((job.data(), job.status(LATER).progress, ClusterRecords(machine).all()))
        with closing(open_store(path)) as store:
            kept = store.load()
        known = states[-1][-1]
        assert kept == {key: record for key, record in known.items() if key in kept}
        assert known.keys() - kept.keys() == {"job/3/tally", "job/4/tally"}, "of jobs that never ran"
    assert states[0] == states[1]
    assert not state_pb2.LedgerRecord.FromString(kept["job/5/ledger"]).held
    assert not state_pb2.ProgressRecord.FromString(kept["job/5/tally"]).told


def test_users_see_all_that_was_there(started: tuple[PinnedCoordinator, Clock]) -> None:
    coordinator, _ = started
    with Client(coordinator.address) as client:
        assert {job.name: job.state for job in client.jobs()} == {
            "running": JobState.RUNNING,
            "waiting": JobState.PENDING,
            "cancelled": JobState.CANCELLED,
            "failed": JobState.FAILED,
            "done": JobState.SUCCEEDED,
        }
        members = {member.member: (member.alive, member.draining) for member in client.status().members}
        assert members == {
            "server-0": (True, False),
            "server-1": (True, False),
            "server-2": (True, True),
            "w0": (True, False),
            "w1": (False, True),
        }
        running = client.job("running")
        status, account = running.status(), running.data()
        assert status.checkpoint
        assert (status.checkpoint.number, status.checkpoint.step) == (3, 3)
        assert status.best
        assert (status.best.number, status.best.step, status.best.values["loss"]) == (1, 2, 0.25)
        assert (status.progress.steps, status.workers) == (4, ("w0",))
        # Of two ranges of 16, w0 holds one, and w1 had done half of the other when it left.
        counts = account.total
        assert (counts.done, counts.leased, counts.requeued, counts.unleased) == (8, 16, 8, 96)
        assert client.job("failed").status().reason.endswith("the program has failed")
        states = [it.state for it in client.job("done").events(follow=False) if isinstance(it, StateChanged)]
        assert states[-1] is JobState.SUCCEEDED
        assert states == sorted(states, key=list(JobState).index)


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_is_complete_and_has_its_values(checkpoints: Path, name: str) -> None:
    folder = Checkpoints(checkpoints)
    folder.verify(name)
    check_values(folder.read(name), name)


def test_the_list_of_checkpoints(checkpoints: Path) -> None:
    folder = Checkpoints(checkpoints)
    assert sorted(map(str, folder.list())) == sorted(SAVED)
    assert folder.show("running/best").number == 1
    assert folder.show("running").number == 3


@pytest.mark.parametrize("shards", [1, 4])
def test_servers_restore_values_slots_and_clocks(checkpoints: Path, shards: int) -> None:
    """The next step has the recorded result, which depends on the optimizer's slots."""
    manifest = Catalogue(open_storage(str(checkpoints))).manifest("running", 3)
    with ShardServers(MIXED, servers=2, shards=shards, optimizer=MOMENTUM, checkpoints=checkpoints) as servers:
        servers.restore(manifest)
        check_values(servers.values(), "running/3")
        assert set(servers.versions()) == {manifest.version}
        with servers.worker("w0") as worker:
            assert worker.step == manifest.step
            worker.push(whole_numbers(TRAINED, 2), updates=updates(5))
        check_values(servers.values(), "one step after running/3")


def test_a_job_goes_on_from_the_store_and_its_checkpoint(
    started: tuple[PinnedCoordinator, Clock], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's servers are gone, so it restarts from its newest checkpoint on new servers, and ends.

    It keeps the order of samples in which it began, so it trains on each sample once an epoch.
    """
    monkeypatch.setenv("SHOAL_TRANSPORT", "grpc")
    coordinator, clock = started
    with ExitStack() as stack:
        servers = stack.enter_context(bare_servers(2, checkpoints))
        calls = stack.enter_context(closing(CoordinatorClient(coordinator.address)))
        client = stack.enter_context(Client(coordinator.address))
        # The worker's life goes on; the servers are not heard, and their leases of 1000 s run out all at once.
        for _ in range(3):
            clock.advance(400.0)
            assert register_worker(calls, "w0") == 4
        assert not any(member.alive for member in client.status().members if member.member.startswith("server"))
        for index, address in enumerate(servers.addresses):
            assert register_server(calls, f"server-{index}", address) == 6 + index
        part = part_of(calls, "w0", register_worker(calls, "w0"), coordinator.settle)
        part.describe({**MIXED, **GIVEN}, samples=64)
        coordinator.settle()
        with part.enter() as training:
            assert training.step == 3
            check_values(training.pull(), "running/3")
            # As it was at the cut: w0 had trained on 12 of its range.
            counts = client.job("running").data().total
            assert (counts.done, counts.leased, counts.requeued, counts.unleased) == (20, 0, 12, 96)
            leased = part.lease()
            assert isinstance(leased, Lease)
            assert leased.order == 0
            cursor = Cursor(leased.number, leased.range.samples)
            training.push(whole_numbers(TRAINED, 2), updates=updates(5), cursor=cursor)
            check_values(client.pull("running"), "one step after running/3")
            part.report(report_of(4))
            trained = train_on_the_rest(LeasedBatches(Numbers(), 8, seed=5, lease=part.lease))
        part.finish()
        # Of the first epoch, the earlier version had trained on the places 0 to 11 and 16 to 23 of NumPy's permutation.
        before = np.random.Generator(np.random.Philox(key=np.array([5, 0], np.uint64))).permutation(64)
        assert sorted([*before[:12], *before[16:24], *trained[0]]) == sorted(trained[1]) == list(range(64))
        coordinator.settle()
        status = client.job("running").status()
        assert (status.state, status.restarts) == (JobState.SUCCEEDED, 1)
        assert client.job("running").data().total.done == 128
        numbers = [event.sequence for event in client.job("running").events(follow=False)]
        assert numbers == sorted(set(numbers))

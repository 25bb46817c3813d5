"""A backup that stalls: calls of its job wait for it without a thread, and other jobs on the primary's server go on."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal import consistency, errors, optim
from shoal._training.parameters import ParameterClient
from shoal._transport import decoded
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.replication import backup_link
from shoal_server.shards import LockGroup, Stamp
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

VARIABLES = {"w": Variable(shape=(64,))}
ONES = {"w": np.ones(64, np.float32)}
# Threads of each pool of the server, and calls of the job that waits: more than the threads of any pool.
THREADS, CALLS = 2, 12
TRANSPORTS = ("grpc", "tcp", "auto")


class TwoJobs(ShardServers):
    """Job "job" on server 0 with a backup on server 1 that can stall, and job "other" on server 0 without a backup."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, Variable] = VARIABLES, **options: Any
    ) -> None:
        super().__init__(variables, servers=2, shards=1, optimizer=optim.SGD(1.0), rpc_threads=THREADS, **options)
        self._reads = threading.Event()
        self._reads.set()
        self._stack.callback(self._reads.set)
        reads = self._reads

        def read(*args: Any) -> Any:
            assert reads.wait(60)
            return decoded(*args)

        monkeypatch.setattr(backup_link, "decoded", read)
        with ShardServers(VARIABLES, shards=1) as plan:
            layout = plan.placement.shards[0].layout
        shards = (replace(self.placement.shards[0], layout=layout),)
        self.others = replace(self.placement, job="other", variables=VARIABLES, shards=shards)
        request = pb.CreateShardsRequest(
            job="other",
            generation=1,
            variables=[VARIABLES["w"].to_proto("w")],
            shards=[layout.to_proto()],
            optimizer=optim.SGD(1.0).to_proto(),
            consistency=consistency.Asynchronous().to_proto(),
        )
        self.stubs[0].CreateShards(request)
        self.stubs[0].AdmitWorkers(_admission("other", "b"))
        for index in range(CALLS):
            self.admit(f"a{index}")
        backup = pb.Peer(server="server-1", address=self.addresses[1])
        added = pb.AddBackupRequest(job="job", generation=1, group=0, term=1, backup=backup)
        wait_until(lambda: self.stubs[0].AddBackup(added).complete, what="the copy")

    @property
    def group(self) -> LockGroup:
        return self.stores[0].hosted.numbered("job", 1, 0)

    def stall(self) -> None:
        """Stalls the backup: it reads nothing more."""
        self._reads.clear()

    def resume(self) -> None:
        self._reads.set()

    def drop_backup(self) -> None:
        self.stubs[0].DropBackup(pb.DropBackupRequest(job="job", generation=1, group=0, term=2))

    def stage(self, index: int, step: int = 0) -> header_pb2.Stamp:
        """Stages a push of a worker, and returns its stamp."""
        self.group.stage(Stamp(f"a{index}", 1, step), 1.0, self.group.version, {0: np.ones(64, np.float32)})
        return header_pb2.Stamp(job="job", generation=1, worker=f"a{index}", incarnation=1, step=step)

    def commit(self, stamp: header_pb2.Stamp, timeout: float = 30.0) -> Any:
        return self.stubs[0].Commit.future(pb.CommitRequest(stamp=stamp, shards=[0]), timeout=timeout)

    def other(self, transport: str) -> ParameterClient:
        return ParameterClient(
            self.others, worker="b", incarnation=1, refresh=lambda: self.others, retry_for_s=5, transport=transport
        )

    @contextmanager
    def quick_other_job(self) -> Iterator[None]:
        """Checks after the block that the other job's pulls, pushes and commits are quick on each transport."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self.other(transport)) for transport in TRANSPORTS]
            for client in clients:
                client.pull()
            yield
            for client in clients:
                client.step = clients[0].step
                begun = time.monotonic()
                client.pull()
                assert client.push(ONES).outcome == "accepted"
                group = self.stores[0].hosted.group("other", 1, [0])
                step = client.step
                group.stage(Stamp("b", 1, step), 1.0, 0, {0: np.ones(64, np.float32)})
                stamp = header_pb2.Stamp(job="other", generation=1, worker="b", incarnation=1, step=step)
                (link,) = client.servers.connections
                link.commit(pb.CommitRequest(stamp=stamp, shards=[0]))
                clients[0].step = step + 1
                assert time.monotonic() - begun < 2.0

    @property
    def waits(self) -> int:
        """Answers that wait for the backup."""
        return sum(log.waiting for log in self.group.logs)


def _admission(job: str, worker: str) -> pb.AdmitWorkersRequest:
    return pb.AdmitWorkersRequest(job=job, workers=[pb.WorkerAdmission(worker=worker, incarnation=1, rank=1)])


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoJobs]:
    with TwoJobs(monkeypatch) as started:
        yield started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CALLS) as threads:
        yield threads


def test_commits_that_wait_for_a_backup_stop_no_other_job(jobs: TwoJobs) -> None:
    stamps = [jobs.stage(index) for index in range(CALLS)]
    with jobs.quick_other_job():
        jobs.stall()
        commits = [jobs.commit(stamp) for stamp in stamps]
        wait_until(lambda: jobs.waits >= CALLS, what="commits that wait for the backup")
    assert not any(commit.done() for commit in commits), "an answer that the backup does not have"
    jobs.resume()
    assert [commit.result().shards[0].outcome for commit in commits] == CALLS * [pb.ACCEPTED]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pushes_that_wait_for_a_backup_stop_no_other_job(
    jobs: TwoJobs, pool: ThreadPoolExecutor, transport: str
) -> None:
    with ExitStack() as stack, jobs.quick_other_job():
        clients = [stack.enter_context(jobs.client(f"a{index}", transport=transport)) for index in range(CALLS)]
        for client in clients:
            client.pull()
        jobs.stall()
        pushes = [pool.submit(client.push, ONES) for client in clients]
        wait_until(lambda: jobs.waits >= CALLS, what="pushes that wait for the backup")
        stack.pop_all()
    assert not wait(pushes, 0).done
    jobs.resume()
    assert [push.result(20).outcome for push in pushes] == CALLS * ["accepted"]
    for client in clients:
        client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("headers_only", [False, True])
def test_pulls_whose_values_the_backup_lacks_stop_no_other_job(
    jobs: TwoJobs, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, transport: str, *, headers_only: bool
) -> None:
    """The backup has the inputs of the pulls, but not the push that came after them."""
    [log] = jobs.group.logs
    copied = log.copied
    monkeypatch.setattr(log, "copied", lambda _: None)
    with ExitStack() as stack, jobs.quick_other_job():
        clients = [stack.enter_context(jobs.client(transport=transport)) for _ in range(CALLS)]
        pull = ParameterClient.barrier if headers_only else ParameterClient.pull
        before = log.number
        pulls: list[Future[Any]] = [pool.submit(pull, client) for client in clients]
        wait_until(lambda: log.number == before + CALLS, what="pulls")
        stamp = jobs.stage(0)
        commit = jobs.commit(stamp)
        wait_until(lambda: jobs.waits > CALLS, what="a commit that waits")
        copied(before + CALLS)
        wait_until(lambda: jobs.waits >= CALLS, what="pulls that wait for the backup once more")
        stack.pop_all()
    assert not wait(pulls, 0).done, "values that the backup does not have"
    copied(log.number)
    for each in pulls:
        result = each.result(20)
        if not headers_only:
            assert result["w"].tolist() == 64 * [-1.0]
    assert commit.result().shards[0].outcome == pb.ACCEPTED
    for client in clients:
        client.close()


def test_calls_of_the_coordinator_that_wait_for_a_backup_stop_no_other_job(jobs: TwoJobs) -> None:
    jobs.stall()
    fence = pb.FenceWorkersRequest(job="job", workers=[pb.WorkerFence(worker="x", incarnation=1)])
    calls: list[Any] = [jobs.stubs[0].FenceWorkers.future(fence, timeout=30) for _ in range(CALLS)]
    calls += [jobs.stubs[0].AdmitWorkers.future(_admission("job", f"c{index}"), timeout=30) for index in range(CALLS)]
    rate = pb.SetRateRequest(job="job", learning_rate=optim.ConstantLR(0.5).to_proto())
    calls += [jobs.stubs[0].SetRate.future(rate, timeout=30) for _ in range(CALLS)]
    wait_until(lambda: jobs.waits >= 3 * CALLS, what="calls that wait")
    assert not any(call.done() for call in calls)
    begun = time.monotonic()
    jobs.stubs[0].AdmitWorkers(_admission("other", "d"), timeout=10)
    jobs.stubs[0].Attach(pb.AttachRequest(), timeout=10)
    assert time.monotonic() - begun < 2.0
    jobs.resume()
    for call in calls:
        call.result()


def test_a_wait_ends_with_its_call(jobs: TwoJobs, pool: ThreadPoolExecutor) -> None:
    stamps = [jobs.stage(index) for index in range(CALLS)]
    with jobs.client("a0", transport="tcp") as worker:
        worker.pull()
        jobs.stall()
        before = jobs.waits
        commits = [jobs.commit(stamp) for stamp in stamps[1:]]
        (link,) = worker.servers.connections
        on_lane = pool.submit(link.commit, pb.CommitRequest(stamp=stamps[0], shards=[0]))
        wait_until(lambda: jobs.waits >= before + CALLS, what="commits that wait")
        for commit in commits:
            commit.cancel()
        worker.close()
        with pytest.raises(errors.ShoalError):
            on_lane.result(20)
    wait_until(lambda: jobs.waits == before, what="the end of the waits")
    wait_until(lambda: not jobs.lanes[0].count, what="the end of the lane")
    jobs.resume()
    assert jobs.commit(stamps[1]).result().shards[0].outcome == pb.ACCEPTED, "the push was committed once"
    assert jobs.group.version == CALLS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_group_refuses_calls_that_wait(jobs: TwoJobs, pool: ThreadPoolExecutor, transport: str) -> None:
    with jobs.client("a0", transport=transport) as worker:
        worker.pull()
        jobs.stall()
        pushed = pool.submit(worker.push, ONES)
        wait_until(lambda: jobs.waits, what="a push that waits")
        jobs.stores[0].drop("job")
        with pytest.raises((errors.Moved, errors.UnknownJob)):
            pushed.result(20)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wait_is_bounded(
    jobs: TwoJobs, pool: ThreadPoolExecutor, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobs.client("a0", transport=transport) as worker:
        worker.pull()
        monkeypatch.setattr("shoal_server.shards.group.backup_wait.COPY_WAIT_S", 0.5)
        jobs.stall()
        (link,) = worker.servers.connections
        stamp = jobs.stage(0)
        committed = pool.submit(link.commit, pb.CommitRequest(stamp=stamp, shards=[0]))
        while not wait([committed], 0.1).done:
            jobs.endpoints[0].end_stalled()
        with pytest.raises(errors.Moved, match="the backup on server-1 has not confirmed the call"):
            committed.result()
        wait_until(lambda: not jobs.waits, what="the end of the wait")


BYTES = 32 << 20  # of a gradient: the sockets between the servers take less


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_gradients_that_the_backup_does_not_read_stop_no_other_job(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, transport: str
) -> None:
    with TwoJobs(monkeypatch, {"w": Variable(shape=(BYTES // 4,))}, mode=consistency.Asynchronous()) as jobs:
        ones = {"w": np.ones(BYTES // 4, np.float32)}
        with ExitStack() as stack, jobs.quick_other_job():
            clients = [stack.enter_context(jobs.client(f"a{index}", transport=transport)) for index in range(4)]
            for client in clients:
                client.pull()
            jobs.stall()
            pushes = [pool.submit(client.push, ones) for client in clients]
            wait_until(lambda: jobs.sample("shoal_server_received_bytes_total") >= 4 * BYTES, what="all gradients")
            stack.pop_all()
        assert not wait(pushes, 0).done
        jobs.resume()
        assert [push.result(60).outcome for push in pushes] == 4 * ["accepted"]
        assert jobs.group.version == 4
        for client in clients:
            client.close()


def test_commits_that_a_cut_holds_back_stop_no_other_job(jobs: TwoJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_server.shards.group.commit_gate.HOLD_S", 60.0)
    stamps = [jobs.stage(index) for index in range(CALLS)]
    with jobs.quick_other_job():
        jobs.group.commit_gate.hold(1)
        commits = [jobs.commit(stamp) for stamp in stamps]
        wait_until(lambda: len(jobs.services[0].waits.all) == CALLS, what="commits that wait")
    assert not any(commit.done() for commit in commits)
    assert jobs.group.version == 0
    commits.pop().cancel()
    wait_until(lambda: len(jobs.services[0].waits.all) == CALLS - 1, what="the end of a wait")
    jobs.group.commit_gate.resume(1)
    assert [commit.result().shards[0].outcome for commit in commits] == (CALLS - 1) * [pb.ACCEPTED]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_commits_go_on_when_a_cut_expires(jobs: TwoJobs, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_server.shards.group.commit_gate.HOLD_S", 0.2)
    with jobs.client("a0", transport=transport) as worker:
        worker.pull()
        jobs.group.commit_gate.hold(1)
        assert worker.push(ONES).outcome == "accepted"

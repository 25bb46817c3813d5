"""Servers that are killed or stopped under jobs with two copies: training goes on, and each update counts once."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._training.pusher import PushResult
from shoal._wire.placement import Placement
from shoal.consistency import Consistency
from support import run_lengths
from support.clusters.local import Mended
from support.training.exact_training import ExactTraining, chosen, exact_training
from support.training.old_view import old_view
from support.waiting import stop_process, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

SERVERS = 3
KILLS, FEW = run_lengths.runs(1, 50), run_lengths.runs(1, 5)
MODES = run_lengths.size(
    [shoal.Synchronous(), shoal.Asynchronous()],
    [shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(2)],
)
# The roles of the servers that are killed, one after the other.
VICTIMS = (("primary", "backup"), ("backup",), ("primary",))
HEARTBEAT_TIMEOUT_S, FLOWS_WITHIN_S, LONGEST_S = 3.0, 3.0, 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def mended(folder: Path) -> Iterator[Mended]:
    cluster = Mended(servers=SERVERS, workers=0, checkpoints=folder)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(mended: Mended, request: pytest.FixtureRequest) -> Iterator[shoal.LocalCluster]:
    with mended.lent(request.session) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with shoal.Client(cluster.address, retry_for_s=60) as client:
        yield client


def index(server: str) -> int:
    return int(server.rpartition("-")[2])


# When the latest server was killed, by the address of the cluster. Tests share a cluster.
_killed_at: dict[str, float] = {}


def kill(cluster: shoal.LocalCluster, server: str) -> float:
    """Kills a server by SIGKILL, a heartbeat timeout after the one before. Returns the time."""
    wait_for_turn(cluster)
    cluster.kill("server", index(server))
    _killed_at[cluster.address] = time.monotonic()
    return _killed_at[cluster.address]


def wait_for_turn(cluster: shoal.LocalCluster) -> None:
    """Waits between two kills: only one server in a heartbeat timeout may be declared lost before its own timeout."""
    wait_for_time(HEARTBEAT_TIMEOUT_S, _killed_at.get(cluster.address, -HEARTBEAT_TIMEOUT_S))


def wait_for_time(seconds: float, since: float) -> None:
    """Waits until some time has passed: for as long as a fault lasts."""
    wait_until(lambda: time.monotonic() - since > seconds, what="the end of the fault")


def check_unbroken(training: ExactTraining) -> None:
    status = training.status
    assert (status.state, status.restarts) == (shoal.JobState.RUNNING, 0), status


def count_exact(counted: run_lengths.RunCount, what: str, training: ExactTraining) -> None:
    """Ends the training, which checks its values, and adds the number of updates as metrics."""
    training.end()
    counted.metrics[f"updates acknowledged, {what}"] = training.acknowledged
    counted.metrics["updates lost or applied twice"] = 0


@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_training_goes_on_when_servers_are_killed(
    cluster: shoal.LocalCluster, client: shoal.Client, mode: Consistency
) -> None:
    gaps: list[float] = []
    with (
        run_lengths.count_runs("server_kill", KILLS, "s until all pushes flow") as counted,
        exact_training(client, f"kill-{type(mode).__name__.lower()}", mode, sessions=3) as training,
    ):
        for wanted in itertools.islice(itertools.cycle(VICTIMS), KILLS):
            victim = chosen(training.roles(), wanted)
            killed_at = kill(cluster, victim)
            gaps.append(training.wait_for_pushes(killed_at))
            assert gaps[-1] < LONGEST_S
            cluster.restart("server", index(victim))
            training.wait_for_copies()
            check_unbroken(training)
            counted.passes(gaps[-1])
        assert training.status.failovers or KILLS < 2
        kind = type(mode).__name__
        spread = counted.spreads(f"s until pushes flow, {kind}", gaps)
        count_exact(counted, kind, training)
    print(f"{KILLS} servers killed, {training.acknowledged} updates exact; pushes again after {spread}")
    if run_lengths.is_long():
        assert np.percentile(gaps, 99) < FLOWS_WITHIN_S


@run_lengths.long_only
@pytest.mark.timeout(60 + 20 * FEW)
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_training_goes_on_with_each_transport(
    cluster: shoal.LocalCluster, client: shoal.Client, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The other tests use shared memory."""
    monkeypatch.setenv("SHOAL_TRANSPORT", transport)
    with (
        run_lengths.count_runs("server_kill", FEW, "s until all pushes flow") as counted,
        exact_training(client, f"over-{transport}", shoal.Synchronous()) as training,
    ):
        for _ in range(FEW):
            victim = training.placement.shards[0].server
            killed_at = kill(cluster, victim)
            gap = training.wait_for_pushes(killed_at)
            cluster.restart("server", index(victim))
            training.wait_for_copies()
            check_unbroken(training)
            counted.passes(gap)


@run_lengths.long_only
@pytest.mark.timeout(120 + 20 * FEW)
def test_servers_are_killed_while_sessions_come_and_go_and_checkpoints_are_taken(
    cluster: shoal.LocalCluster, client: shoal.Client, folder: Path
) -> None:
    checkpoints, ended = shoal.Checkpoints(str(folder)), threading.Event()
    saved: list[int] = []

    def come_and_go() -> int:
        pushes = 0
        while not ended.is_set():
            with client.session("busy", worker=f"guest-{pushes}") as guest:
                for _ in range(3):
                    guest.pull()
                    guest.push(training.ones)
                    pushes += 1
        return pushes

    def save() -> None:
        while not ended.is_set():
            try:
                found = client.job("busy").checkpoint(timeout_s=60)
            except errors.StorageFailed as error:
                # A call to the killed server may fail before the coordinator declares it lost.
                if not any(why in error.message for why in ("was lost during the checkpoint", "UNAVAILABLE")):
                    raise
                continue
            saved.append(found.number)
            for name, values in checkpoints.read(f"busy/{found.number}").items():
                np.testing.assert_array_equal(values, -found.step, f"{name} at step {found.step}")

    with (
        run_lengths.count_runs("server_kill", FEW, "s until all pushes flow") as counted,
        exact_training(client, "busy", shoal.Synchronous(), workers=3, waits=False) as training,
        ThreadPoolExecutor(2) as pool,
    ):
        guests = pool.submit(come_and_go)
        training.wait_for_start()
        saved_all = pool.submit(save)
        try:
            for wanted in itertools.islice(itertools.cycle(VICTIMS), FEW):
                victim = chosen(training.roles(), wanted)
                killed_at = kill(cluster, victim)
                gap = training.wait_for_pushes(killed_at)
                cluster.restart("server", index(victim))
                training.wait_for_copies()
                check_unbroken(training)
                counted.passes(gap)
        finally:
            ended.set()
        saved_all.result(60)
        print(f"{FEW} servers killed, {guests.result(60)} pushes of guests, {len(saved)} checkpoints, all exact")
        assert saved


AWAY_S, BACK_WITHIN_S = 2.0, run_lengths.size(10.0, 5.0)


@pytest.mark.timeout(60 + 30 * KILLS)
@pytest.mark.parametrize("moment", run_lengths.size(["while it is away"], ["together", "while it is away"]))
@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_a_server_dies_with_the_coordinator(
    cluster: shoal.LocalCluster, client: shoal.Client, mode: Consistency, moment: str
) -> None:
    """The coordinator is away for two seconds. Pushes flow again within five seconds of its return."""
    gaps: list[float] = []
    name = f"{moment.replace(' ', '-')}-{type(mode).__name__.lower()}"
    with (
        run_lengths.count_runs("server_and_coordinator_kill", KILLS, "s until all pushes flow") as counted,
        exact_training(client, name, mode, sessions=2) as training,
    ):
        for wanted in itertools.islice(itertools.cycle(VICTIMS), KILLS):
            victim = chosen(training.roles(), wanted)
            wait_for_turn(cluster)
            cluster.kill("coordinator")
            if moment != "together":
                training.wait_for_pushes()  # they need no coordinator
            killed_at = kill(cluster, victim)
            wait_for_time(AWAY_S, killed_at)
            cluster.restart("coordinator")
            back_at = time.monotonic()
            training.wait_for_pushes(killed_at)
            gaps.append(time.monotonic() - back_at)
            assert gaps[-1] < BACK_WITHIN_S
            assert name in {status.job.name for status in client.jobs()}, "the job is lost"
            cluster.restart("server", index(victim))
            training.wait_for_copies()
            check_unbroken(training)
            counted.passes(gaps[-1])
        spread = counted.spreads(f"s until pushes flow, {type(mode).__name__}, {moment}", gaps)
        count_exact(counted, f"{type(mode).__name__}, {moment}", training)
        counted.metrics["jobs lost"] = 0
    print(f"{KILLS} times, {training.acknowledged} updates exact; after the coordinator's return: {spread}")


STOPPED_S, HEALED_WITHIN_S = run_lengths.size((5.0, 10.0), (10.0, 5.0))  # a busy machine takes longer
STOPS = run_lengths.runs(1, 20)


@pytest.mark.timeout(60 + 40 * STOPS)
def test_a_stopped_primary_answers_nothing_when_it_goes_on(cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    """A read and a write wait in its sockets when it goes on. It may have them only refused, and joins again."""
    cluster.process("server", 2).ask_to_stop()  # so that the stopped server is the only place for the next backups
    cluster.process("server", 2).reap(20)
    gaps: list[float] = []
    with (
        run_lengths.count_runs("stopped_primary", STOPS, "s until all pushes flow") as counted,
        exact_training(client, "stopped", shoal.Asynchronous(), workers=3, waits=False) as training,
        ThreadPoolExecutor(2) as pool,
        client.session("stopped", worker="idle") as idle,
    ):
        training.wait_for_start()
        for _ in range(STOPS):
            idle.pull()
            old = training.placement
            victim = old.shards[0].server
            process = cluster.process("server", index(victim))
            with old_view(client, old) as reader, old_view(client, old, "idle", idle.step) as writer:
                for view in (reader, writer):
                    view.pull()  # opens the connections
                stop_process(process.pid)
                stopped_at = time.monotonic()
                gaps.append(training.wait_for_pushes(stopped_at))
                assert gaps[-1] < HEALED_WITHIN_S
                assert victim not in training.roles(), "it was not replaced"
                answers: list[Future[Any]] = [pool.submit(reader.pull), pool.submit(writer.push, training.ones)]
                wait_for_time(STOPPED_S, stopped_at)
                assert not any(answer.done() for answer in answers)
                os.kill(process.pid, signal.SIGCONT)
                for answer in answers:
                    assert isinstance(answer.exception(40), shoal.ShoalError), f"it answers {answer.result()}"
            training.wait_for_copies()
            assert victim in training.roles()
            check_unbroken(training)
            counted.passes(gaps[-1])
        assert idle.push(training.ones).outcome == "accepted"
        training.acknowledges(1)
        spread = counted.spreads("s until pushes flow", gaps)
        count_exact(counted, "Asynchronous", training)
    print(f"{STOPS} servers stopped for {STOPPED_S:g} s, {training.acknowledged} updates exact; {spread}")


# Sessions whose last push is sent again after each failover, and the failovers.
SENDERS, FAILOVERS = run_lengths.size((20, 2), (100, 10))
RESENT = SENDERS * FAILOVERS
OLDER = 1  # earlier pushes of each session that are sent again, too


@pytest.mark.timeout(60 + RESENT)
def test_pushes_that_are_sent_again_after_a_failover_change_nothing(
    cluster: shoal.LocalCluster, client: shoal.Client
) -> None:
    """The last push of each session is recognised, and gets its first answer.

    An earlier one is refused: nobody waits for its answer, because a session pushes again only after it has the answer.
    Its step does not say whether it was accepted, dropped as late, or never pushed.
    """
    with (
        run_lengths.count_runs("replayed_pushes", RESENT, "pushes applied twice") as counted,
        exact_training(client, "resent", shoal.Asynchronous(), workers=2 + SENDERS, waits=False) as training,
        ExitStack() as stack,
        ThreadPoolExecutor(SENDERS) as pool,
    ):
        opened = [pool.submit(client.session, "resent", worker=f"sender-{rank}") for rank in range(SENDERS)]
        senders = [stack.enter_context(session.result()) for session in opened]
        training.wait_for_start()
        refused = 0
        for _ in range(FAILOVERS):
            last = {sender.worker: push_some(sender, training, OLDER + 1) for sender in senders}
            victim = training.placement.shards[0].server
            killed_at = kill(cluster, victim)
            training.wait_for_pushes(killed_at)
            training.pause()
            values, now = client.pull("resent"), training.placement
            assert victim not in {shard.server for shard in now.shards}
            for sender in senders:
                refused += push_again(client, now, sender, training, last[sender.worker])
            for name, found in client.pull("resent").items():
                np.testing.assert_array_equal(found, values[name])
            counted.passes(0, SENDERS)
            training.go_on()
            cluster.restart("server", index(victim))
            training.wait_for_copies()
            check_unbroken(training)
        for sender in senders:  # they are where they were
            push_some(sender, training, 1)
        counted.metrics |= {"recognised after a failover": RESENT, "earlier ones refused, and not applied": refused}
        count_exact(counted, "replayed after a failover", training)
    print(
        f"{RESENT} pushes again, all recognised; {refused} earlier ones refused; {training.acknowledged} updates exact"
    )


def push_some(sender: shoal.Session, training: ExactTraining, pushes: int) -> PushResult:
    """Pushes ones. Returns the last answer."""
    for _ in range(pushes):
        sender.pull()
        result = sender.push(training.ones)
        assert result.outcome == "accepted"
        training.acknowledges(1)
    return result


def push_again(
    client: shoal.Client, now: Placement, sender: shoal.Session, training: ExactTraining, last: PushResult
) -> int:
    """Sends the last push of a session again, and some earlier ones. Returns the number of pushes that are refused."""
    refused = 0
    for step in range(sender.step - 1 - OLDER, sender.step):
        with old_view(client, now, sender.worker, step) as again:
            again.pull()
            if step == sender.step - 1:
                assert again.push(training.ones) == last
            else:
                with pytest.raises(errors.BadRequest, match="only the last push may be repeated"):
                    again.push(training.ones)
                refused += 1
    return refused

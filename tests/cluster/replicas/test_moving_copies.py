"""Servers that die while the copies of a job move: the job continues, and each acknowledged update counts once.

A server that is about to leave makes the copies move. Copies are slow, so that they take longer than the tests need to
kill a server meanwhile.
"""

import signal
from collections.abc import Iterator

import pytest

import shoal
from shoal.status import JobState
from support import run_lengths
from support.clusters.local import QUICK, Mended
from support.training.exact_training import ExactTraining, exact_training
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

# Elements of each of six variables, which make 2.4 MB: a server copies 1 MB a second.
ELEMENTS = 100_000
SLOW = {**QUICK, "server": ["--copy-bandwidth", "1"]}
SERVERS = ("server-0", "server-1", "server-2")
MODES = {"sync": shoal.Synchronous(), "async": shoal.Asynchronous()}


@pytest.fixture(scope="module")
def mended() -> Iterator[Mended]:
    cluster = Mended(servers=3, workers=0, flags=SLOW)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(mended: Mended, request: pytest.FixtureRequest) -> Iterator[shoal.LocalCluster]:
    with mended.lent(request.session) as lent:
        yield lent


def roles(training: ExactTraining) -> dict[str, str]:
    """Returns the server of the primary, that of the backup, and the one that gets the next copy."""
    shard = training.placement.shards[0]
    [other] = {*SERVERS} - {shard.server, shard.backup}
    return {"primary": shard.server, "backup": shard.backup, "next": other}


def signal_to(cluster: shoal.LocalCluster, server: str, number: signal.Signals) -> None:
    cluster.process("server", SERVERS.index(server)).send_signal(number)


def await_copy(training: ExactTraining, term: int) -> None:
    wait_until(lambda: training.placement.shards[0].term > term, what="the beginning of a copy")


KILLS = [(drained, killed) for drained in ("primary", "backup") for killed in ("primary", "backup", "next")]
CASES = [(drained, killed, mode) for drained, killed in KILLS for mode in MODES]


# In the short form, each kill in one of the modes.
@pytest.mark.parametrize(("drained", "killed", "mode"), run_lengths.size([*CASES[::4], *CASES[3::4]], CASES))
def test_no_acknowledged_update_is_lost_with_a_server(
    cluster: shoal.LocalCluster, drained: str, killed: str, mode: str
) -> None:
    name = f"{mode}-{drained}-{killed}"
    with cluster.client() as client, exact_training(client, name, MODES[mode], elements=ELEMENTS, shards=1) as training:
        before, term = roles(training), training.placement.shards[0].term
        signal_to(cluster, before[drained], signal.SIGTERM)
        await_copy(training, term)
        assert roles(training) == before, "the copy is being made, and two others are complete"
        training.wait_for_pushes()
        signal_to(cluster, before[killed], signal.SIGKILL)
        training.wait_for_pushes()
        left = cluster.process("server", SERVERS.index(before[drained]))
        wait_until(lambda: left.returncode is not None, timeout_s=30, what="the end of the server that drains")
        training.wait_for_pushes()
        status = training.status
        assert (status.state, status.restarts) == (JobState.RUNNING, 0)


@pytest.mark.parametrize("drained", ["primary", "backup"])
def test_there_are_two_copies_all_the_time(cluster: shoal.LocalCluster, drained: str) -> None:
    with (
        cluster.client() as client,
        exact_training(client, f"calm-{drained}", MODES["async"], elements=ELEMENTS, shards=1) as training,
    ):
        before = roles(training)
        left = cluster.process("server", SERVERS.index(before[drained]))
        left.send_signal(signal.SIGTERM)

        def is_over() -> bool:
            assert training.status.copies == 2, training.status.reason
            return left.returncode is not None

        wait_until(is_over, timeout_s=30, what="the end of the server that drains")
        kept = before["backup" if drained == "primary" else "primary"]
        after = training.placement.shards[0]
        assert (after.server, after.backup) == (kept, before["next"])
        status = training.status
        assert (status.restarts, status.failovers) == (0, 0)

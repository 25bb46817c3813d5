"""Servers that die right after a lock group was split: the job continues, and each acknowledged update counts once.

A server that comes gets a part of a lock group, which is split for that. Copies are slow, so that the part is still on
its way when a server is killed.
"""

import signal

import pytest

import shoal
from shoal.status import JobState
from support import run_lengths
from support.clusters.local import QUICK, local_cluster
from support.training.exact_training import ExactTraining, exact_training
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

# Elements of each of six variables, which make 9.6 MB: a server copies 2 MB a second.
ELEMENTS = 400_000
SLOW = {**QUICK, "server": ["--copy-bandwidth", "2"]}
MODES = {"sync": shoal.Synchronous(), "async": shoal.Asynchronous()}
CASES = [("primary", "sync"), ("backup", "async"), ("primary", "async"), ("backup", "sync")]


def groups(training: ExactTraining) -> dict[int, tuple[str, str]]:
    """Returns the servers of the primary and of the backup of each lock group."""
    return {number: (it[0].server, it[0].backup) for number, it in training.placement.by_group().items()}


# In the short form, each kill in one of the modes.
@pytest.mark.parametrize(("killed", "mode"), run_lengths.size(CASES[:2], CASES))
def test_no_acknowledged_update_is_lost_with_a_server(killed: str, mode: str) -> None:
    with (
        local_cluster(2, 0, flags=SLOW) as cluster,
        cluster.client() as client,
        exact_training(client, f"{killed}-{mode}", MODES[mode], elements=ELEMENTS) as training,
    ):
        before = groups(training)
        cluster.add_server()

        def is_split() -> bool:
            assert training.status.copies == 2, training.status.reason
            return len(groups(training)) > len(before)

        wait_until(is_split, timeout_s=30, what="a split")
        after = groups(training)
        [part] = after.keys() - before.keys()
        assert set(after[part]) == {"server-0", "server-1"}, "two copies are complete, and none has moved yet"
        training.wait_for_pushes()
        server = after[part][["primary", "backup"].index(killed)]
        cluster.process("server", int(server.removeprefix("server-"))).send_signal(signal.SIGKILL)
        training.wait_for_pushes()
        training.wait_for_copies()
        status = training.status
        assert (status.state, status.restarts) == (JobState.RUNNING, 0)
        assert server not in {it for pair in groups(training).values() for it in pair}

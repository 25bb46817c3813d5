"""Shared memory after its users end or are killed: no segment is left, and no surviving process keeps one mapped."""

import random
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from support import run_lengths
from support.faults.killable_role import KillableRole
from support.faults.killable_roles import Nursery
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

KILLED = -signal.SIGKILL
# Lines of the code that shares memory, on either side: with the 500th or so the first step is over.
FIRST_STEP, LATER_STEPS = (1, 500), (501, 1_500)
LANES = 2  # of a worker to a server, each with a segment


class Server(NamedTuple):
    """A server that outlives the tests, and its address."""

    process: KillableRole
    address: str


@pytest.fixture(scope="module")
def server(nursery: Nursery) -> Iterator[Server]:
    """Yields a server that lives until the end of the module."""
    server = nursery.server()
    yield Server(server, server.hear())
    server.kill()


def moments(count: int, seed: int) -> list[int]:
    """Returns seeded numbers of lines at which a process dies. Most of them are within its first step."""
    rng = random.Random(seed)
    return [rng.randint(*rng.choice((FIRST_STEP, FIRST_STEP, FIRST_STEP, LATER_STEPS))) for _ in range(count)]


def wait_until_nothing_is_left(nursery: Nursery, *survivors: KillableRole) -> None:
    wait_until(
        lambda: not nursery.segments() and not any(survivor.shares() for survivor in survivors),
        what="the segments' end",
    )


class TestKill9:
    """Kills by SIGKILL, at random lines of the code that shares memory."""

    def test_of_workers(self, nursery: Nursery, server: Server) -> None:
        for moment in moments(run_lengths.runs(5, 10), seed=1):
            assert nursery.worker(server.address, doom=moment).end() == KILLED
            wait_until_nothing_is_left(nursery, server.process)
            another = nursery.worker(server.address)
            another.hear_until("2")
            assert (another.shares(), server.process.shares(), nursery.segments()) == (LANES, LANES, set())
            assert another.kill() == KILLED
            wait_until_nothing_is_left(nursery, server.process)

    def test_of_servers(self, nursery: Nursery) -> None:
        for moment in moments(run_lengths.runs(8, 20), seed=2):
            server = nursery.server(doom=moment)
            worker = nursery.worker(server.hear())
            assert server.end() == KILLED
            worker.hear_until("unreachable")
            wait_until_nothing_is_left(nursery, worker)
            worker.kill()

    def test_of_both(self, nursery: Nursery) -> None:
        for moment in moments(run_lengths.runs(3, 5), seed=3):
            server = nursery.server()
            assert nursery.worker(server.hear(), doom=moment).end() == KILLED
            assert server.kill() == KILLED
            next_server = nursery.server()
            next_server.hear()
            assert not nursery.segments()
            next_server.kill()


class TestUnannouncedSegment:
    """A segment whose owner is killed before it sends a hello."""

    def test_is_removed(self, nursery: Nursery, server: Server) -> None:
        for _ in range(10):
            client = nursery.mute(server.address)
            name = client.hear()
            assert nursery.segments() == {name}
            client.kill()
            wait_until_nothing_is_left(nursery)

    def test_stays_while_its_owner_lives(self, nursery: Nursery, server: Server) -> None:
        living, dying = nursery.mute(server.address), nursery.mute(server.address)
        name, other = living.hear(), dying.hear()
        assert nursery.segments() == {name, other}
        dying.kill()
        wait_until(lambda: nursery.segments() == {name}, what="the other name's end")
        living.kill()
        wait_until_nothing_is_left(nursery)

    def test_is_removed_by_the_next_server_if_this_one_is_killed_too(self, nursery: Nursery) -> None:
        server = nursery.server()
        client = nursery.mute(server.hear())
        name = client.hear()
        server.kill()
        client.kill()
        assert nursery.segments() == {name}
        server = nursery.server()
        server.hear()
        assert not nursery.segments()
        server.kill()

"""Ticket of a pull: an answer can be read repeatedly, a refusal ends the pull, an abandoned pull leaves no ticket."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from shoal import consistency, errors, initializers, optim
from shoal._wire import Chunk
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal._wire.limits import CHUNK_BYTES
from shoal.v1.header_pb2 import ShardHeader
from shoal.variables import Variable
from shoal_server.serving.pulls import PendingPull, replies
from shoal_server.shards.group.backup_wait import Confirmation
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.values.shard import JobShardConfig, Stamp
from support.pull_replies import decode_values

STAMP = Stamp("a", 1, 5)


@dataclass
class FakeGroup:
    """Answers when it is told to."""

    error: errors.ShoalError | None = None
    at_once: bool = False
    term: int = 0
    asked: list[tuple[PendingPull, Stamp, int]] = field(default_factory=list)
    abandoned: list[PendingPull] = field(default_factory=list)

    def pull(self, ticket: PendingPull, stamp: Stamp, ahead: int) -> None:
        if self.error:
            raise self.error
        self.asked.append((ticket, stamp, ahead))
        if self.at_once:
            ticket.answer(stamp.step)

    def abandon(self, ticket: PendingPull) -> None:
        self.abandoned.append(ticket)


class Wakes:
    """Counts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


def pull_of(group: Any, wakes: Wakes, *, shards: Sequence[int] = (0, 1)) -> PendingPull:
    return PendingPull(group, real_group([3, 3]).select(shards), wakes)


def test_the_group_is_asked_once_however_many_shards_it_has(wakes: Wakes) -> None:
    group = FakeGroup()
    pull = pull_of(group, wakes)
    pull.start(STAMP, 1)
    assert group.asked == [(pull, STAMP, 1)]
    assert (pull.take(), pull.waits, wakes.count) == (None, True, 0)


def test_an_answer_wakes_and_stays(wakes: Wakes) -> None:
    pull = pull_of(FakeGroup(), wakes)
    pull.start(STAMP, 0)
    pull.answer(7)
    assert (pull.take(), pull.take(), pull.waits, wakes.count) == (7, 7, False, 1)


def test_the_group_may_answer_while_it_is_asked(wakes: Wakes) -> None:
    pull = pull_of(FakeGroup(at_once=True), wakes)
    pull.start(STAMP, 0)
    assert (pull.take(), wakes.count) == (5, 1)


def test_a_refusal_hides_the_answer_and_stays(wakes: Wakes) -> None:
    pull = pull_of(FakeGroup(at_once=True), wakes)
    pull.start(STAMP, 0)
    pull.refuse(errors.UnknownJob("gone"))
    pull.refuse(errors.Fenced("another"))
    for _ in range(2):
        with pytest.raises(errors.UnknownJob, match="gone"):
            pull.take()
    assert wakes.count == 3


def test_a_group_that_raises_refuses_the_pull(wakes: Wakes) -> None:
    pull = pull_of(FakeGroup(errors.Overloaded("full")), wakes)
    pull.start(STAMP, 0)
    with pytest.raises(errors.Overloaded):
        pull.take()
    assert (pull.waits, wakes.count) == (True, 1)


def test_who_gives_up_takes_the_ticket_back(wakes: Wakes) -> None:
    group = FakeGroup()
    pull = pull_of(group, wakes)
    pull.start(STAMP, 0)
    pull.abandon()
    assert group.abandoned == [pull]


def test_a_worker_asks_for_all_shards_and_a_reader_for_any(wakes: Wakes) -> None:
    group = FakeGroup()
    pull = pull_of(group, wakes, shards=[1])
    pull.start(STAMP, 0)
    with pytest.raises(errors.BadRequest, match="names 1 of the 2 shards of job in this lock group; name all of them"):
        pull.take()
    assert not group.asked
    pull_of(group, wakes, shards=[1]).start(Stamp("", 0, 0), 0)
    assert len(group.asked) == 1


# On real shards.


def real_group(sizes: Sequence[int], mode: consistency.Consistency | None = None) -> LockGroup:
    """A group with a shard of each of these numbers of elements, and one worker."""
    variables = {f"v{n}": Variable((size,), initializer=initializers.Uniform(-1, 1)) for n, size in enumerate(sizes)}
    layouts = [
        ShardLayout(n, (ArenaLayout(it.dtype, it.aggregation, (Slice(name, 0, it.shape[0], 0),), it.shape[0]),))
        for n, (name, it) in enumerate(variables.items())
    ]
    config = JobShardConfig("job", 3, variables, optim.SGD(1.0), mode or consistency.Synchronous(), 0)
    group = LockGroup(config, layouts)
    group.admit("a", 1, 0)
    return group


def real_pull(group: LockGroup) -> PendingPull:
    return PendingPull(group, group.select([shard.layout.shard for shard in group.shards]), lambda: None)


def test_an_abandoned_pull_waits_nowhere() -> None:
    group = real_group([3, 3])
    group.admit("b", 1, 1)
    pull = real_pull(group)
    pull.start(Stamp("a", 1, 1), 0)
    assert group.queues[0] == 1
    pull.abandon()
    assert group.queues[0] == 0


class Check:
    """Refuses from when `revoked` is set."""

    revoked = False

    def __call__(self) -> None:
        if self.revoked:
            raise errors.Unauthenticated("revoked")


def test_a_waiting_pull_ends_when_its_caller_is_refused(wakes: Wakes) -> None:
    group, check, waiting = real_group([3, 3]), Check(), set[PendingPull]()
    group.admit("b", 1, 1)
    pull = PendingPull(group, group.select([0, 1]), wakes, check=check, waiting=waiting)
    pull.start(Stamp("a", 1, 1), 0)
    pull.end_if_refused()
    assert (pull.take(), waiting, group.queues[0], wakes.count) == (None, {pull}, 1, 0)
    check.revoked = True
    pull.end_if_refused()
    assert (waiting, group.queues[0], wakes.count) == (set(), 0, 1)
    with pytest.raises(errors.Unauthenticated):
        pull.take()


def test_values_are_not_read_for_a_caller_that_was_refused_while_it_waited(wakes: Wakes) -> None:
    check, waiting = Check(), set[PendingPull]()
    pull = PendingPull(cast(LockGroup, FakeGroup()), real_group([3]).select([0]), wakes, check=check, waiting=waiting)
    pull.start(STAMP, 0)
    check.revoked = True
    pull.answer(7)
    with pytest.raises(errors.Unauthenticated):
        pull.take()
    assert not waiting


@pytest.mark.parametrize("end", [lambda it: it.abandon(), lambda it: it.refuse(errors.UnknownJob("gone"))])
def test_a_pull_that_ended_does_not_wait(wakes: Wakes, end: Callable[[PendingPull], None]) -> None:
    waiting = set[PendingPull]()
    pull = PendingPull(cast(LockGroup, FakeGroup()), real_group([3]).select([0]), wakes, waiting=waiting)
    pull.start(STAMP, 0)
    assert waiting == {pull}
    end(pull)
    assert waiting == set()


def test_a_pull_of_a_group_that_is_closed_is_refused() -> None:
    group = real_group([3])
    group.admit("b", 1, 1)
    pull = real_pull(group)
    pull.start(Stamp("a", 1, 1), 0)
    group.close()
    with pytest.raises(errors.UnknownJob):
        pull.take()
    pull.abandon()  # harmless


def check_decoded(pull: PendingPull, *, headers_only: bool) -> list[tuple[list[ShardHeader], list[Chunk]]]:
    """The replies: headers and chunks of each message, and the bytes that it is said to carry."""
    found = []
    with replies(pull, 4, headers_only=headers_only) as messages:
        for pieces, nbytes in messages:
            headers, chunks = decode_values(b"".join(pieces))
            assert nbytes == sum(len(chunk.data) for chunk in chunks)
            found.append((headers, chunks))
    return found


def test_replies_begin_with_all_headers_and_carry_each_shard_whole() -> None:
    sizes = (3, CHUNK_BYTES // 4 + 5, 7)
    group = real_group(sizes)
    messages = check_decoded(real_pull(group), headers_only=False)
    assert [(h.shard, h.generation, h.version, h.step) for h in messages[0][0]] == [(n, 3, 0, 4) for n in range(3)]
    assert not any(headers for headers, _ in messages[1:])
    assert all(chunks for _, chunks in messages)
    for number, size in enumerate(sizes):  # too large together: each has a slab of its own
        chunks = [chunk for _, chunks in messages for chunk in chunks if chunk.shard == number]
        assert [chunk.offset for chunk in chunks] == list(range(0, size * 4, CHUNK_BYTES))
        values = np.frombuffer(b"".join(chunk.data for chunk in chunks), np.float32)
        np.testing.assert_array_equal(values, group.shards[number].arenas[0].values)


def test_values_of_small_shards_are_one_chunk() -> None:
    group = real_group([3, 4, 5])
    [(headers, [chunk])] = check_decoded(real_pull(group), headers_only=False)
    assert [header.shard for header in headers] == [0, 1, 2]
    assert (chunk.shard, chunk.arena, chunk.offset) == (0, 0, 0)
    values = np.concatenate([shard.arenas[0].values for shard in group.shards])
    np.testing.assert_array_equal(np.frombuffer(chunk.data, np.float32), values)


def test_replies_to_a_barrier_are_headers_alone() -> None:
    [(headers, chunks)] = check_decoded(real_pull(real_group([3, 3])), headers_only=True)
    assert [(header.shard, header.version, header.step) for header in headers] == [(0, 0, 4), (1, 0, 4)]
    assert not chunks


def test_abandoned_replies_let_their_shards_go() -> None:
    group = real_group([CHUNK_BYTES])
    with suppress(KeyboardInterrupt), replies(real_pull(group), 0, headers_only=False) as messages:
        next(messages)
        assert group.shards[0].arenas[0].slab.latest(0).in_use
        raise KeyboardInterrupt
    assert not group.shards[0].arenas[0].slab.latest(0).in_use


def test_a_transfer_ends_when_its_caller_may_not_have_the_values_any_longer() -> None:
    group = real_group([CHUNK_BYTES, CHUNK_BYTES])
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > 2:
            raise errors.Unauthenticated("revoked")

    pull = PendingPull(group, group.select([0, 1]), lambda: None, check=check)
    with replies(pull, 0, headers_only=False) as messages:
        assert all(next(messages) for _ in range(2))
        with pytest.raises(errors.Unauthenticated):
            next(messages)


class Unconfirmed:
    """A wait for a backup, which the test ends."""

    def __init__(self) -> None:
        self.waits, self.withdrawn = True, False
        self.error: errors.ShoalError | None = None
        self.call: Callable[[], object] = bool

    def on_end(self, call: Callable[[], object]) -> None:
        self.call = call

    def end(self, error: errors.ShoalError | None = None) -> None:
        self.waits, self.error = False, error
        self.call()

    def check(self) -> None:
        if self.error:
            raise self.error

    def withdraw(self) -> None:
        self.waits, self.withdrawn = False, True


def unconfirmed_pull(wakes: Wakes) -> tuple[PendingPull, Unconfirmed, LockGroup]:
    group, wait = real_group([CHUNK_BYTES]), Unconfirmed()
    pull = PendingPull(group, group.select([0]), wakes, confirmation=lambda: cast(Confirmation, wait))
    pull.start(Stamp("", 0, 0), 0)
    assert pull.take() is not None
    assert not pull.waits
    return pull, wait, group


def in_use(group: LockGroup) -> bool:
    return bool(group.shards[0].arenas[0].slab.latest(0).in_use)


def test_values_that_the_backup_lacks_wait_for_it(wakes: Wakes) -> None:
    pull, wait, group = unconfirmed_pull(wakes)
    woken = wakes.count
    assert not pull.ready(headers_only=False)
    assert pull.waits
    assert in_use(group)
    wait.end()
    assert wakes.count == woken + 1
    assert pull.ready(headers_only=False)
    with pull.read() as reading:
        assert reading.version == 0
    assert not in_use(group)


@pytest.mark.parametrize("end", ["abandoned", "refused"])
def test_values_that_are_not_sent_are_let_go(wakes: Wakes, end: str) -> None:
    pull, wait, group = unconfirmed_pull(wakes)
    assert not pull.ready(headers_only=False)
    if end == "abandoned":
        pull.abandon()
        assert wait.withdrawn
    else:
        wait.end(errors.Moved("elsewhere"))
        with pytest.raises(errors.Moved):
            pull.ready(headers_only=False)
    assert not in_use(group)
    assert not pull.waits


def test_headers_that_the_backup_lacks_wait_for_it(wakes: Wakes) -> None:
    pull, wait, group = unconfirmed_pull(wakes)
    assert not pull.ready(headers_only=True)
    assert not in_use(group)
    wait.end()
    assert pull.ready(headers_only=True)
    assert pull.version() == 0

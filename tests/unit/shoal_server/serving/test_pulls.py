"""Tickets of a pull: each grant is taken once, a refusal ends the pull, and an abandoned pull leaves no ticket."""

import threading
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal import consistency, errors, initializers, optim
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal._wire.limits import CHUNK_BYTES
from shoal.variables import Variable
from shoal_server.serving.pulls import PendingPull, PullGrant, replies
from shoal_server.shards.shard import JobShardConfig, Shard, Stamp
from support.pull_replies import decode_values

STAMP = Stamp("a", 1, 5)


@dataclass
class FakeShard:
    """Answers when it is told to."""

    error: errors.ShoalError | None = None
    at_once: bool = False
    asked: list = field(default_factory=list)
    abandoned: list = field(default_factory=list)

    def pull(self, ticket, stamp, ahead):
        if self.error:
            raise self.error
        self.asked.append((ticket, stamp, ahead))
        if self.at_once:
            ticket.answer(stamp.step)

    def abandon(self, ticket):
        self.abandoned.append(ticket)

    def answer(self, step):
        self.asked[0][0].answer(step)

    def refuse(self, error):
        self.asked[0][0].refuse(error)


class Wakes:
    """Counts the calls."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def shards():
    return [FakeShard() for _ in range(3)]


@pytest.fixture
def wakes():
    return Wakes()


@pytest.fixture
def pull(shards, wakes):
    return PendingPull(shards, wakes)


def test_every_shard_is_asked_once_with_a_ticket_of_its_own(pull, shards):
    pull.start(STAMP, 1)
    assert [(stamp, ahead) for shard in shards for _, stamp, ahead in shard.asked] == [(STAMP, 1)] * 3
    assert len({id(ticket) for shard in shards for ticket, _, _ in shard.asked}) == 3


def test_answers_are_taken_once_each_and_wake_once_each(pull, shards, wakes):
    pull.start(STAMP, 0)
    assert pull.take() == []
    assert (wakes.count, pull.waits) == (0, True)
    shards[2].answer(7)
    shards[0].answer(5)
    assert wakes.count == 2
    assert pull.take() == [PullGrant(shards[2], 7), PullGrant(shards[0], 5)]
    assert pull.take() == []
    assert pull.waits
    shards[1].answer(6)
    assert not pull.waits
    assert pull.take() == [PullGrant(shards[1], 6)]


def test_shards_may_answer_while_they_are_asked(wakes):
    shards = [FakeShard(at_once=True), FakeShard(), FakeShard(at_once=True)]
    pull = PendingPull(shards, wakes)
    pull.start(STAMP, 0)
    assert [answer.shard for answer in pull.take()] == [shards[0], shards[2]]
    assert wakes.count == 2
    assert pull.waits


def test_a_refusal_hides_what_was_answered_and_stays(pull, shards, wakes):
    pull.start(STAMP, 0)
    shards[0].answer(5)
    shards[1].refuse(errors.UnknownJob("gone"))
    shards[2].refuse(errors.Fenced("another"))
    for _ in range(2):
        with pytest.raises(errors.UnknownJob, match="gone"):
            pull.take()
    assert wakes.count == 3
    assert pull.waits, "the tickets of those that did not answer are to be taken back"


def test_a_shard_that_raises_ends_the_asking(shards, wakes):
    shards[1].error = errors.Overloaded("full")
    pull = PendingPull(shards, wakes)
    pull.start(STAMP, 0)
    assert shards[0].asked
    assert not shards[2].asked
    with pytest.raises(errors.Overloaded):
        pull.take()
    assert pull.waits
    assert wakes.count == 1


def test_who_gives_up_takes_all_tickets_back(pull, shards):
    pull.start(STAMP, 0)
    shards[0].answer(5)
    pull.abandon()
    for shard in shards:
        assert shard.abandoned == [shard.asked[0][0]]


def test_answers_from_many_threads_are_all_there(wakes):
    shards = [FakeShard() for _ in range(50)]
    pull = PendingPull(shards, wakes)
    pull.start(STAMP, 0)
    threads = [threading.Thread(target=shard.answer, args=(step,)) for step, shard in enumerate(shards)]
    for thread in threads:
        thread.start()
    taken = []
    while len(taken) < 50:
        taken += pull.take()
    for thread in threads:
        thread.join()
    assert sorted(answer.step for answer in taken) == list(range(50))
    assert not pull.waits


# On real shards.


def real_shard(number, elements, mode=None):
    name = f"v{number}"
    variable = Variable((elements,), initializer=initializers.Uniform(-1, 1))
    arena = ArenaLayout(variable.dtype, variable.aggregation, (Slice(name, 0, elements, 0),), elements)
    config = JobShardConfig("job", 3, {name: variable}, optim.SGD(1.0), mode or consistency.Synchronous(), number)
    shard = Shard(config, ShardLayout(number, (arena,)))
    shard.admit("a", 1, 0)
    return shard


def test_an_abandoned_pull_waits_nowhere():
    shards = [real_shard(number, 3) for number in range(2)]
    for shard in shards:
        shard.admit("b", 1, 1)
    pull = PendingPull(shards, lambda: None)
    pull.start(Stamp("a", 1, 1), 0)
    assert [shard.queues[0] for shard in shards] == [1, 1]
    pull.abandon()
    assert [shard.queues[0] for shard in shards] == [0, 0]


def test_a_pull_of_a_shard_that_is_closed_is_refused():
    shard = real_shard(0, 3)
    shard.admit("b", 1, 1)
    pull = PendingPull([shard], lambda: None)
    pull.start(Stamp("a", 1, 1), 0)
    shard.close()
    with pytest.raises(errors.UnknownJob):
        pull.take()
    pull.abandon()  # harmless


def decoded(answers, **options):
    """The replies: headers and chunks of each message, and the bytes that it is said to carry."""
    found = []
    with replies(answers, **options) as messages:
        for pieces, nbytes in messages:
            headers, chunks = decode_values(b"".join(pieces))
            assert nbytes == sum(len(chunk.data) for chunk in chunks)
            found.append((headers, chunks))
    return found


def test_replies_begin_with_all_headers_and_carry_each_shard_whole():
    sizes = (3, CHUNK_BYTES // 4 + 5, 7)
    shards = [real_shard(number, size) for number, size in enumerate(sizes)]
    messages = decoded([PullGrant(shard, 4) for shard in shards], headers_only=False)
    assert [(h.shard, h.generation, h.version, h.step) for h in messages[0][0]] == [(n, 3, 0, 4) for n in range(3)]
    assert not any(headers for headers, _ in messages[1:])
    assert all(chunks for _, chunks in messages)
    for number, size in enumerate(sizes):
        chunks = [chunk for _, chunks in messages for chunk in chunks if chunk.shard == number]
        assert [chunk.offset for chunk in chunks] == list(range(0, size * 4, CHUNK_BYTES))
        values = np.frombuffer(b"".join(chunk.data for chunk in chunks), np.float32)
        np.testing.assert_array_equal(values, shards[number]._arenas[0].values)


def test_replies_to_a_barrier_are_headers_alone():
    [(headers, chunks)] = decoded([PullGrant(real_shard(number, 3), 4) for number in range(2)], headers_only=True)
    assert [(header.shard, header.version, header.step) for header in headers] == [(0, 0, 4), (1, 0, 4)]
    assert not chunks


def test_replies_that_are_given_up_let_their_shards_go():
    shard = real_shard(0, CHUNK_BYTES)
    with suppress(KeyboardInterrupt), replies([PullGrant(shard, 0)], headers_only=False) as messages:
        next(messages)
        assert shard._snapshot.in_use
        raise KeyboardInterrupt
    assert not shard._snapshot.in_use

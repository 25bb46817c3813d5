"""Times of ranks: what heartbeats carry, the last minute, and the straggler."""

import pytest

from shoal.status import Bubble, StageTimes
from shoal_distribute.collectives.times import GroupTimings, RankTimes, TimesBoard


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_knows_the_last_minute_of_all() -> None:
    clock = Clock()
    boards = [TimesBoard(rank, 2, clock) for rank in range(2)]
    for clock.now in range(100):
        for board, wait in zip(boards, (0.5, 0.25), strict=True):
            board.own.steps += 1
            board.own.calls += 2
            board.own.wait += wait
        for rank, board in enumerate(boards):
            boards[1 - rank].reported(rank, board.told())
    clock.now += 1
    boards[1].own.transfer += 3.0
    first, second = boards[1].timings().ranks
    assert first == RankTimes(59, 59, 118, 0.0, 29.5, 0.0)
    assert second == RankTimes(60, 59, 118, 0.0, 14.75, 3.0)  # its own are of now
    boards[1].reported(0, b"")  # another version
    assert boards[1].timings().ranks[0] == first


def test_a_process_without_heartbeats_keeps_its_last_minute() -> None:
    clock = Clock()
    board = TimesBoard(0, 1, clock)
    for _ in range(1000):  # ten steps a second
        clock.now += 0.1
        board.own.steps += 1
        board.keep()
    (found,) = board.timings().ranks
    assert 59 <= found.seconds <= 61.5
    assert found.steps == pytest.approx(10 * found.seconds)
    clock.now += 1000
    board.keep()
    assert board.timings().ranks[0].steps == 0


def test_the_straggler_is_the_rank_for_which_the_others_wait() -> None:
    def of(*waits: float, calls: int = 100) -> GroupTimings:
        return GroupTimings(tuple(RankTimes(60.0, 50, calls, 0.0, wait, 1.0) for wait in waits))

    assert (straggler := of(7.0, 8.0, 1.0, 9.0).straggler()) is not None
    assert (straggler.rank, straggler.seconds) == (2, 0.07)
    assert str(of(7.0, 8.0, 1.0)).splitlines()[-1] == "rank 2 is a straggler: the others wait 65 ms for it in each call"
    assert of(2.0, 3.0, 4.0).straggler() is None  # less than 5% of a minute
    assert of(1.0, 9.0, calls=4).straggler() is None
    assert of(1.0).straggler() is None
    assert GroupTimings().straggler() is None
    assert "50     100          0.000      4.000      1.000" in str(of(2.0, 4.0))


def test_ranks_tell_how_long_their_stages_wait() -> None:
    clock = Clock()
    boards = [TimesBoard(rank, 2, clock) for rank in range(2)]
    assert boards[0].timings().bubble() is None
    for clock.now in range(100):
        for board, stage, wait in zip(boards, range(2), (0.25, 0.5), strict=True):
            before = board.own.stage or StageTimes(stage, 2, 4)
            board.own.stage = before.later(1.0, wait)
        for rank, board in enumerate(boards):
            boards[1 - rank].reported(rank, board.told())
    timings = boards[0].timings()
    assert [it.stage for it in timings.ranks] == [StageTimes(0, 2, 4, 59.0, 14.75), StageTimes(1, 2, 4, 59.0, 29.5)]
    assert timings.bubble() == Bubble(0.375, 2, 4)
    text = "bubble 0.375; equal stages would have 0.200 with 4 micro-batches, and 0.111 with 8"
    assert str(timings).splitlines()[-1] == text


def test_a_stage_without_a_step_has_no_bubble() -> None:
    idle, busy = RankTimes(stage=StageTimes(0, 2, 1)), RankTimes(stage=StageTimes(1, 2, 1, 2.0, 1.0))
    assert GroupTimings((idle, busy)).bubble() == Bubble(0.5, 2, 1)
    found = GroupTimings((idle,)).bubble()
    assert str(found) == "bubble -; equal stages would have 0.500 with 1 micro-batch, and 0.333 with 2"

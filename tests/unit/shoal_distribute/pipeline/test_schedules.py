"""Schedules of pipelines: their order, what they hold, and the bubble of equal stages."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.status import ideal_bubble
from shoal_distribute.pipeline.schedules import SCHEDULES, StageSchedule, schedule_of, split_of

schedules = st.sampled_from(list(SCHEDULES.values()))
sizes = st.integers(1, 7)


def simulated(schedule: StageSchedule, stages: int, micro_batches: int, capacity: int) -> tuple[float, list[int]]:
    """Returns the duration of a step of equal stages, and the most micro-batches that each stage holds.

    Receives wait for a message, and sends wait while the link is full, as between threads. A forward pass takes 1, and
    a backward pass 2.
    """
    works = [deque(schedule.passes(stage, stages, micro_batches)) for stage in range(stages)]
    done: dict[tuple[int, bool, int], float] = {}
    clocks, held, most, read = [0.0] * stages, [0] * stages, [0] * stages, dict.fromkeys(range(stages), (0, 0))
    unsent: dict[int, tuple[bool, int]] = {}
    while any(works) or unsent:
        before = len(done), dict(unsent), dict(read)
        for stage in range(stages):
            if stage in unsent:
                is_forward, number = unsent[stage]
                receiver = stage + 1 if is_forward else stage - 1
                if number - read[receiver][0 if is_forward else 1] < capacity:
                    del unsent[stage]
            elif works[stage]:
                work = works[stage][0]
                source = stage - 1 if work.is_forward else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    sent = done.get((source, work.is_forward, work.micro_batch))
                    if sent is None or unsent.get(source) == (work.is_forward, work.micro_batch):
                        continue
                    ready = sent
                    forward, backward = read[stage]
                    read[stage] = (forward + 1, backward) if work.is_forward else (forward, backward + 1)
                works[stage].popleft()
                clocks[stage] = max(clocks[stage], ready) + (1 if work.is_forward else 2)
                done[stage, work.is_forward, work.micro_batch] = clocks[stage]
                held[stage] += 1 if work.is_forward else -1
                most[stage] = max(most[stage], held[stage])
                if 0 <= (stage + 1 if work.is_forward else stage - 1) < stages:
                    unsent[stage] = work.is_forward, work.micro_batch
        assert before != (len(done), unsent, read), "no stage can go on"
    return max(clocks), most


@given(schedules, sizes, st.integers(1, 12))
def test_each_stage_computes_every_micro_batch_once_each_way_in_order(schedule: StageSchedule, p: int, m: int) -> None:
    for stage in range(p):
        works = schedule.passes(stage, p, m)
        assert [it.micro_batch for it in works if it.is_forward] == list(range(m))
        assert [it.micro_batch for it in works if not it.is_forward] == list(range(m))
        for number in range(m):
            passes = [it.is_forward for it in works if it.micro_batch == number]
            assert passes == [True, False]


@given(schedules, sizes, st.integers(1, 12), st.integers(1, 3))
def test_the_stages_never_block_each_other_and_hold_what_the_schedule_says(
    schedule: StageSchedule, p: int, m: int, capacity: int
) -> None:
    seconds, most = simulated(schedule, p, m, capacity)
    assert most == [schedule.held(stage, p, m) for stage in range(p)]
    assert 1 - 3 * m / seconds == pytest.approx(ideal_bubble(p, m))


def test_one_forward_one_backward_holds_less_than_gpipe() -> None:
    assert [schedule_of("1f1b").held(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [schedule_of("gpipe").held(stage, 4, 8) for stage in range(4)] == [8] * 4
    assert " ".join(map(str, schedule_of("1f1b").passes(1, 3, 4))) == "F0 F1 B0 F2 B1 F3 B2 B3"


@given(st.integers(1, 50), st.integers(1, 50))
def test_micro_batches_have_all_samples_and_differ_by_one_at_most(samples: int, micro_batches: int) -> None:
    lengths = [it.stop - it.start for it in split_of(samples, micro_batches)]
    assert sum(lengths) == samples
    assert max(lengths) - min(lengths) <= 1


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="schedule is 'pipe'; use 'gpipe' or '1f1b'"):
        schedule_of("pipe")

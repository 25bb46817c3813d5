"""What pages ask for again and again: how much of it they are given, and how often it is made."""

import json
from contextlib import contextmanager

import pytest

from shoal import errors
from shoal.status import StepTiming, Timings
from shoal_coordinator.page.reader import Reader


class Coordinator:
    """One with the timings of jobs, by name."""

    def __init__(self, **jobs):
        self.now, self.jobs, self.made = 1_000.0, jobs, []

    @contextmanager
    def reading(self):
        yield self, self.now

    def job(self, name):
        if name not in self.jobs:
            raise errors.UnknownJob(name)
        return Job(self, name)


class Job:
    def __init__(self, coordinator, name):
        self.coordinator, self.name = coordinator, name

    def timings(self):
        self.coordinator.made.append(self.name)
        return self.coordinator.jobs[self.name]


def reader_of(coordinator):
    return Reader(coordinator, None, {}, 1.0)


def timings(workers, steps=100):
    """Of workers whose latest 32 steps are fast."""
    found = tuple(StepTiming(step, 1.0, compute=0.1 if step >= steps - 32 else 0.5) for step in range(steps))
    return Timings({f"w{number}": found for number in range(workers)})


@pytest.mark.parametrize(("workers", "each"), [(0, 0), (2, 32), (128, 32), (256, 16)])
def test_a_page_is_given_the_latest_steps_and_what_all_that_are_kept_say(workers, each):
    told = json.loads(reader_of(Coordinator(a=timings(workers))).timings("a"))
    assert len(told["workers"]) == workers
    for worker in told["workers"]:
        assert [step["step"] for step in worker["steps"]] == [*range(100 - each, 100)]
        assert worker["typical"]["compute"] == pytest.approx(0.3), "a median of 64"


def test_pages_that_ask_within_a_second_have_the_same_answer():
    coordinator = Coordinator(a=timings(1), b=timings(2))
    reader = reader_of(coordinator)
    first = reader.timings("a")
    coordinator.jobs["a"] = timings(3)
    coordinator.now += 0.9
    assert reader.timings("a") == first
    reader.timings("b")
    assert coordinator.made == ["a", "b"]
    coordinator.now += 0.2
    assert len(json.loads(reader.timings("a"))["workers"]) == 3
    assert len(reader._timings) == 2
    coordinator.now += 1.0
    reader.timings("b")
    assert len(reader._timings) == 1, "those that nobody asks for are not kept"
    del coordinator.jobs["b"]
    with pytest.raises(errors.UnknownJob):
        reader.timings("b")

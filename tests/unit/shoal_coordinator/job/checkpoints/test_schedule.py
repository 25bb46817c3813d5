"""Schedule of a job's checkpoints: when they are due, which are complete, and which policies are valid."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.checkpoint_policy import NEVER, CheckpointChoice, CheckpointPolicy
from shoal.job import Job
from shoal.status import SavedCheckpoint
from shoal.v1 import job_pb2
from shoal_coordinator.job.checkpoints.schedule import CheckpointSchedule

START = 1_000.0


def saved(number: int, step: int = 0) -> SavedCheckpoint:
    return SavedCheckpoint(number, step, 100, START)


def by_time(every_s: float = 60.0) -> CheckpointSchedule:
    return CheckpointSchedule(CheckpointPolicy(every_s=every_s), START)


def by_steps(every_steps: int = 100) -> CheckpointSchedule:
    return CheckpointSchedule(CheckpointPolicy(every_s=0, every_steps=every_steps), START)


class TestWhenOneIsDue:
    def test_by_time_since_the_last_began(self) -> None:
        saves = by_time()
        assert not saves.due(START + 59.9, 10**6)
        assert saves.due(START + 60, 0)
        saves.begin(START + 61, 0)
        assert not saves.due(START + 300, 0), "one is under way"
        saves.committed(saved(1), ())
        assert not saves.due(START + 120, 0)
        assert saves.due(START + 121, 0)

    def test_by_steps_on_their_marks_however_late_each_is_noticed(self) -> None:
        saves = by_steps()
        assert not saves.due(START + 10**6, 99)
        for noticed, following in ((107, 200), (215, 300)):
            assert saves.due(START, noticed)
            saves.begin(START, noticed)
            saves.committed(saved(noticed), ())
            assert not saves.due(START, following - 1)
            assert saves.due(START, following)

    def test_on_demand_alone(self) -> None:
        saves = CheckpointSchedule(NEVER, START)
        assert not saves.due(START + 10**9, 10**9)
        assert saves.request(START) == saves.request(START) == 1
        assert saves.due(START, 0)
        saves.begin(START, 0)
        assert saves.request(START) == 2, "the one under way is of an earlier state"
        assert not saves.due(START, 0)
        saves.committed(saved(1), ())
        assert saves.due(START, 0)

    def test_after_a_failure_soon_but_not_at_once(self) -> None:
        saves = by_time(3600.0)
        saves.begin(START + 3600, 0)
        saves.failed("the disk is full")
        assert saves.failure == "the disk is full"
        assert not saves.due(START + 3601, 0)
        assert saves.due(START + 3610, 0)
        saves.begin(START + 3610, 0)
        saves.committed(saved(1), ())
        assert saves.failure == ""

    def test_after_failures_later_each_time_up_to_ten_minutes(self) -> None:
        saves, now, waits = by_time(3600.0), START + 3600, []
        for _ in range(9):
            saves.begin(now, 0)
            saves.failed("the store is away")
            wait = next(wait for wait in range(10, 10_000, 10) if saves.due(now + wait, 0))
            assert not saves.due(now + wait - 0.1, 0)
            waits.append(wait)
            now += wait
        assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
        saves.request(now)
        assert saves.due(now, 0), "who asks does not wait"
        saves.begin(now, 0)
        saves.committed(saved(1), ())
        saves.begin(now + 3600, 0)
        saves.failed("the store is away again")
        assert saves.due(now + 3610, 0)

    def test_only_requested_checkpoints_are_retried(self) -> None:
        saves = CheckpointSchedule(NEVER, START)
        saves.request(START)
        saves.begin(START, 0)
        saves.failed("the disk is full")
        assert not saves.due(START + 10**6, 0)

    def test_a_restart_drops_the_checkpoint_in_progress(self) -> None:
        saves = by_steps()
        saves.begin(START, 100)
        saves.request(START)
        saves.restart(START + 5, 40)
        assert not saves.pending
        assert not saves.due(START + 5, 139)
        assert saves.due(START + 5, 140)


class TestWithoutAFolder:
    def test_none_is_due_whatever_the_job_asks_for(self) -> None:
        saves = CheckpointSchedule(CheckpointPolicy(every_steps=1), START, possible=False)
        assert not saves.possible
        assert not saves.at_end
        assert not saves.due(START + 10**9, 10**9)
        assert (saves.newest, saves.failure) == (None, "")
        saves.validate()

    def test_those_that_there_were_are_remembered(self) -> None:
        before = by_time()
        before.begin(START, 0)
        before.committed(saved(1), ())
        before.begin(START, 0)
        before.request(START)
        saves = CheckpointSchedule(CheckpointPolicy(), START, possible=False)
        saves.restore_from(before.to_proto(), START + 100)
        saves.validate()
        assert saves.to_proto() == before.to_proto()
        assert (saves.newest, saves.busy, saves.pending) == (saved(1), True, True)
        saves.failed("there is no folder")
        assert not saves.pending, "nobody waits for what cannot be had"
        assert not saves.due(START + 10**6, 0)
        assert not saves.request_again(START)


def test_a_number_is_larger_than_any_before_it_and_any_that_the_folder_has() -> None:
    saves = by_time()
    assert [saves.take_number(above=largest) for largest in (0, 0, 7, 3)] == [1, 2, 8, 9]
    other = by_time()
    other.restore_from(saves.to_proto(), START + 100)
    assert other.take_number(above=0) == 10


def test_removed_checkpoints_are_not_listed() -> None:
    saves = by_time()
    for number in (1, 2, 3):
        saves.begin(START, 0)
        saves.committed(saved(number), (1,) if number == 3 else ())
    assert [it.number for it in saves.saved] == [2, 3]
    assert saves.newest == saves.saved[-1]


@given(st.lists(st.sampled_from(["request", "begin", "written", "failed", "restart"]), max_size=20))
def test_a_record_is_all_that_there_is(calls: list[str]) -> None:
    saves, number = by_time(), 0
    for call in calls:
        match call:
            case "request":
                saves.request(START)
            case "begin" if not saves.busy:
                saves.begin(START + 5, 30)
            case "written" if saves.busy:
                number += 1
                saves.committed(saved(number), ())
            case "failed" if saves.busy:
                saves.failed("full")
            case "restart":
                saves.restart(START + 9, 20)
        saves.validate()
    other = by_time()
    other.restore_from(saves.to_proto(), START + 100)
    assert other.to_proto() == saves.to_proto()
    assert (other.saved, other.failure, other.busy, other.pending) == (
        saves.saved,
        saves.failure,
        saves.busy,
        saves.pending,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"every_s": -1},
        {"every_s": 0.5},
        {"every_s": float("nan")},
        {"every_s": float("inf")},
        {"every_s": "60"},
        {"every_s": True},
        {"every_steps": -1},
        {"every_steps": 1.5},
        {"keep_last": 0},
        {"keep_every": -1},
        {"at_end": "yes"},
    ],
    ids=str,
)
def test_an_invalid_policy_is_refused(options: Mapping[str, Any]) -> None:
    with pytest.raises(errors.InvalidJob, match="checkpoints"):
        CheckpointPolicy(**options)


def test_a_policy_travels() -> None:
    policy = CheckpointPolicy(every_s=1.5, every_steps=7, at_end=False, keep_last=9, keep_every=4)
    assert CheckpointPolicy.from_proto(policy.to_proto()) == policy
    assert CheckpointPolicy.from_proto(NEVER.to_proto()) == NEVER
    assert not NEVER.takes_any
    assert CheckpointPolicy(every_s=0, at_end=True).takes_any


@pytest.mark.parametrize("text", ["digits", "digits/7", "d-9/123456"])
def test_a_choice_is_read_as_it_is_written(text: str) -> None:
    choice = CheckpointChoice.parse(text, partial=True)
    assert str(choice) == text
    assert CheckpointChoice.from_proto(choice.to_proto()) == choice


@pytest.mark.parametrize(
    "text", ["", "/", "digits/", "digits/x", "../digits", "a/1/2", "Digits", "a\0", "a" * 64, "a/0", "a/1\n"]
)
def test_no_choice(text: str) -> None:
    with pytest.raises(errors.InvalidJob, match="does not name"):
        CheckpointChoice.parse(text)
    with pytest.raises(errors.InvalidJob, match="does not name"):
        CheckpointChoice.from_proto(job_pb2.CheckpointChoice(job=text))


def test_a_job_says_it_all() -> None:
    policy = CheckpointPolicy(every_steps=10)
    job = Job("m:f", name="a", checkpoints=policy, restore="b/3", partial_restore=True)
    assert Job.from_proto(job.to_proto()) == job
    assert job.source == CheckpointChoice("b", 3, True)
    plain = Job("m:f", name="a")
    assert Job.from_proto(plain.to_proto()).checkpoints is None
    assert plain.source is None


@pytest.mark.parametrize(
    "options",
    [{"checkpoints": 60}, {"restore": "../x"}, {"restore": None}, {"partial_restore": True}, {"partial_restore": 1}],
    ids=str,
)
def test_a_job_that_makes_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidJob):
        Job("m:f", name="a", **options)


def test_after_a_restart_with_an_earlier_clock_a_failed_checkpoint_is_tried_again_as_soon_as_before() -> None:
    saves = by_time()
    saves.begin(START, 0)
    saves.failed("full")
    assert saves.request_again(START)
    pause_s = saves.to_proto().wanted_from - START
    other = by_time()
    other.restore_from(saves.to_proto(), START - 300)
    assert not other.due(START - 300 + pause_s - 0.1, 0)
    assert other.due(START - 300 + pause_s, 0)

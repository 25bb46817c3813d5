"""Decisions of a worker's daemon about which trainer to run: scripted cases, and random histories."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import errors
from shoal._wire.cursor import Cursor
from shoal.status import JobState, JobStatus
from shoal_worker.assignment import (
    Assigned,
    AssignedJob,
    AssignmentEffect,
    AssignmentEvent,
    AssignmentMachine,
    Finish,
    IncarnationChanged,
    JobOver,
    Leave,
    Renew,
    StartTrainer,
    StopAfterBatchRequested,
    StopRequested,
    StopTrainer,
    StopTrainerAfterBatch,
    TrainerEnded,
    why_stopped,
)
from shoal_worker.messages import TrainerOutcome

A, B = AssignedJob("a", 1, 1), AssignedJob("b", 2, 1)
DONE = TrainerEnded(0, TrainerOutcome(), progressed=True)
KILLED = TrainerEnded(-9, None, progressed=False)


def fed(machine: AssignmentMachine, *events: AssignmentEvent) -> list[AssignmentEffect]:
    """The effects of the last event."""
    effects: list[AssignmentEffect] = []
    for event in events:
        effects = machine.handle(event)
        machine.validate()
    return effects


def registered(*events: AssignmentEvent) -> AssignmentMachine:
    machine = AssignmentMachine()
    fed(machine, IncarnationChanged(1), *events)
    return machine


def test_work_is_started_once() -> None:
    machine = registered()
    assert fed(machine, Assigned(A)) == [StartTrainer(A)]
    assert fed(machine, Assigned(A)) == []


def test_work_that_is_done_is_finished_and_not_started_again() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, DONE) == [Finish("")]
    assert fed(machine, Assigned(A)) == []
    assert fed(machine, Assigned(None), Assigned(B)) == [StartTrainer(B)]


def test_a_new_assignment_of_the_same_job_starts_a_new_trainer() -> None:
    machine = registered(Assigned(A), DONE)
    again = AssignedJob("a", 5, 1)
    assert fed(machine, Assigned(again)) == [StartTrainer(again)]


def test_an_error_is_reported_to_the_coordinator() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, TrainerEnded(0, TrainerOutcome("ValueError"), progressed=True)) == [Finish("ValueError")]


@pytest.mark.parametrize(
    ("ended", "effect"),
    [
        (TrainerEnded(0, TrainerOutcome("E"), True, "a limit"), Finish("E; a limit")),
        (TrainerEnded(0, TrainerOutcome("E\n  trace"), True, "a limit"), Finish("E\n  trace\na limit")),
        (TrainerEnded(0, TrainerOutcome(), True, "a limit"), Finish("")),
        (TrainerEnded(-6, None, True, "a limit"), Renew("the trainer was killed by SIGABRT; a limit")),
    ],
)
def test_an_error_names_the_limit_that_the_trainer_may_have_exceeded(
    ended: TrainerEnded, effect: AssignmentEffect
) -> None:
    assert fed(registered(Assigned(A)), ended) == [effect]


def test_other_work_waits_until_the_old_trainer_is_gone() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, Assigned(B)) == [StopTrainer()]
    assert fed(machine, Assigned(B)) == []
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == [StartTrainer(B)]


def test_withdrawn_work_is_stopped_without_a_report() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, Assigned(None)) == [StopTrainer()]
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == []
    assert fed(machine, Assigned(A)) == [StartTrainer(A)]


def test_a_job_that_is_over_is_stopped() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, JobOver(A)) == [StopTrainer()]
    assert fed(machine, TrainerEnded(0, TrainerOutcome(), progressed=True)) == []
    assert fed(machine, Assigned(A)) == []


def test_a_killed_trainer_means_a_new_life() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, KILLED) == [Renew("the trainer was killed by SIGKILL")]
    assert fed(machine, Assigned(A)) == []  # an answer that was under way
    again = AssignedJob("a", 3, 2)
    assert fed(machine, IncarnationChanged(2), Assigned(again)) == [StartTrainer(again)]


def test_an_answer_to_an_earlier_life_starts_nothing() -> None:
    assert fed(registered(), IncarnationChanged(2), Assigned(A)) == []


def test_a_program_that_always_kills_its_process_fails_its_job() -> None:
    machine = registered()
    for life in (1, 2):
        assigned = AssignedJob("a", life, life)
        assert fed(machine, IncarnationChanged(life), Assigned(assigned)) == [StartTrainer(assigned)]
        assert fed(machine, KILLED) == [Renew("the trainer was killed by SIGKILL")]
    [finish] = fed(machine, IncarnationChanged(3), Assigned(AssignedJob("a", 3, 3)), KILLED)
    assert isinstance(finish, Finish)
    assert "3 times in a row" in finish.error


def test_deaths_after_progress_never_add_up() -> None:
    machine = registered()
    for life in range(1, 10):
        fed(machine, IncarnationChanged(life), Assigned(AssignedJob("a", life, life)))
        assert fed(machine, TrainerEnded(-9, None, progressed=True)) == [Renew("the trainer was killed by SIGKILL")]


def test_a_fenced_trainer_has_not_finished() -> None:
    machine = registered(Assigned(A))
    [renew] = fed(machine, TrainerEnded(0, TrainerOutcome("not admitted", fenced=True), progressed=True))
    assert renew == Renew("the trainer cannot continue: not admitted")


FENCED = TrainerEnded(0, TrainerOutcome("not admitted", fenced=True), progressed=False)


def renewed(machine: AssignmentMachine, life: int, *endings: TrainerEnded) -> list[AssignmentEffect]:
    """Ends a trainer in each of the next lives, and returns the effects of the last end."""
    effects: list[AssignmentEffect] = []
    for number, ending in enumerate(endings, life):
        effects = fed(machine, IncarnationChanged(number), Assigned(AssignedJob("a", number, number)), ending)
    return effects


def test_a_fence_says_nothing_about_the_program_and_is_no_crash() -> None:
    machine = registered()
    assert renewed(machine, 1, FENCED, FENCED, KILLED) == [Renew("the trainer was killed by SIGKILL")]
    assert renewed(machine, 4, FENCED, KILLED) == [Renew("the trainer was killed by SIGKILL")]
    [finish] = renewed(machine, 6, FENCED, KILLED)  # a fence does not end a row of crashes either
    assert isinstance(finish, Finish)
    assert finish.trainer_failed
    assert "SIGKILL; this happened 3 times in a row" in finish.error


def test_a_worker_that_is_always_fenced_asks_for_a_quarantine() -> None:
    machine = registered()
    assert renewed(machine, 1, *[FENCED] * 9) == [Renew("the trainer cannot continue: not admitted")]
    [finish] = renewed(machine, 10, FENCED)
    assert isinstance(finish, Finish)
    assert finish.trainer_failed
    assert "10 times in a row" in finish.error
    assert "check the coordinator, the servers, and the network" in finish.error


def test_fences_after_progress_never_add_up() -> None:
    progressed = TrainerEnded(0, TrainerOutcome("not admitted", fenced=True), progressed=True)
    assert renewed(registered(), 1, *[progressed] * 30) == [Renew("the trainer cannot continue: not admitted")]


def test_an_exit_without_a_word_fails_the_job() -> None:
    machine = registered(Assigned(A))
    [finish] = fed(machine, TrainerEnded(3, None, progressed=False))
    assert isinstance(finish, Finish)
    assert "exit status 3" in finish.error


def test_being_declared_lost_stops_the_trainer() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, IncarnationChanged(2)) == [StopTrainer()]
    again = AssignedJob("a", 2, 2)
    assert fed(machine, Assigned(again)) == []
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == [StartTrainer(again)]


def test_closing_waits_for_the_trainer_to_go() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, StopRequested()) == [StopTrainer()]
    assert not machine.done
    assert fed(machine, Assigned(B)) == []
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == []
    assert machine.done


def test_leave_lets_the_trainer_finish_its_batch() -> None:
    machine = registered(Assigned(A))
    assert fed(machine, StopAfterBatchRequested()) == [StopTrainerAfterBatch()]
    assert fed(machine, StopAfterBatchRequested(), Assigned(A)) == []
    assert not machine.done
    left = TrainerOutcome(left=True, cursor=Cursor(3, 16))
    assert fed(machine, TrainerEnded(0, left, progressed=True)) == [Leave(Cursor(3, 16))]
    assert machine.done
    assert fed(machine, Assigned(B)) == []


def test_leave_without_work_is_done_at_once() -> None:
    machine = registered()
    assert fed(machine, StopAfterBatchRequested()) == []
    assert machine.done


def test_a_trainer_that_is_finished_as_its_daemon_leaves_has_finished() -> None:
    machine = registered(Assigned(A), StopAfterBatchRequested())
    assert fed(machine, DONE) == [Finish("")]


def test_a_trainer_that_dies_as_its_daemon_leaves_is_no_reason_for_a_new_life() -> None:
    machine = registered(Assigned(A), StopAfterBatchRequested())
    assert fed(machine, KILLED) == [Leave(None)]


def test_leave_ends_at_once_when_there_is_no_more_time() -> None:
    machine = registered(Assigned(A), StopAfterBatchRequested())
    assert fed(machine, StopRequested()) == [StopTrainer()]
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == []
    assert machine.done


def test_work_that_is_taken_back_meanwhile_is_stopped() -> None:
    machine = registered(Assigned(A), StopAfterBatchRequested())
    assert fed(machine, Assigned(B)) == [StopTrainer()]
    assert fed(machine, TrainerEnded(-15, None, progressed=True)) == []
    assert machine.done


works = st.builds(AssignedJob, st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 3))
endings = st.builds(
    TrainerEnded,
    st.sampled_from([0, 1, -9]),
    st.none() | st.builds(TrainerOutcome, st.sampled_from(["", "no"]), st.booleans(), st.booleans()),
    st.booleans(),
)
events = st.one_of(
    st.builds(IncarnationChanged, st.integers(1, 3)),
    st.builds(Assigned, st.none() | works),
    st.builds(JobOver, works),
    endings,
    st.builds(StopAfterBatchRequested),
    st.builds(StopRequested),
)


@given(st.lists(events, max_size=30))
def test_there_is_never_more_than_one_trainer_and_each_is_stopped_once(history: Sequence[Any]) -> None:
    machine = AssignmentMachine()
    running, stops = False, 0
    for event in history:
        if isinstance(event, TrainerEnded):
            if not running:
                continue
            running, stops = False, 0
        for effect in machine.handle(event):
            if isinstance(effect, StartTrainer):
                assert not running
                running, stops = True, 0
            elif isinstance(effect, StopTrainer):
                assert running
                stops += 1
                assert stops == 1
        machine.validate()


REFUSED = "UNKNOWN_JOB: long is gone from this server: its job has ended or was dropped"


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        (JobState.CANCELLED, "", "job long was cancelled"),
        (JobState.CANCELLED, "ann", "job long was cancelled: ann"),
        (JobState.FAILED, "a program raised\nTraceback", "job long failed: a program raised"),
        (JobState.SUCCEEDED, "", "job long has ended"),
        (JobState.PENDING, "server s1 is about to leave", "server s1 is about to leave"),
        (JobState.RUNNING, "", REFUSED),
    ],
)
def test_the_reason_is_that_of_the_job(state: JobState, reason: str, words: str) -> None:
    status = JobStatus(shoal.Job(name="long"), state, reason)
    assert why_stopped("long", REFUSED, lambda: status) == words


@pytest.mark.parametrize(
    ("error", "words"), [(errors.UnknownJob("none"), "job long was dropped"), (errors.Unreachable("gone"), REFUSED)]
)
def test_without_a_status_the_error_counts(error: errors.ShoalError, words: str) -> None:
    def status() -> JobStatus:
        raise error

    assert why_stopped("long", REFUSED, status) == words

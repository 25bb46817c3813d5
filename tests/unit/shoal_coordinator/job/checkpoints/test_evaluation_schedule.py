"""Schedule of a job's evaluations: the worker that evaluates, the best result, its checkpoint, and early stopping."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import shoal
from shoal import errors, optim
from shoal._wire import ReportAck
from shoal.consistency import Consistency
from shoal.evaluation_policy import EvaluationPolicy
from shoal.events import EvaluationEnded
from shoal.status import Evaluation, JobState
from shoal_coordinator.job.checkpoints.evaluation_schedule import EvaluationSchedule
from shoal_coordinator.messages import CommitCheckpoint, CreateShards, ScanCheckpoints, SetLearningRate, TakeCut
from shoal_coordinator.messages.events import CheckpointFailed, CheckpointRequested, LearningRateRequested
from support.clusters.cluster_rig import KEEPING, Rig, job

NAN = math.nan


def found(number: int, step: int = 0, **values: Any) -> Evaluation:
    return Evaluation(number, step, values)


def evaluate(machine: EvaluationSchedule, values: Sequence[float], *, every: int = 10) -> list[bool | None]:
    """One worker's evaluations of these accuracies, one after the other; for each, whether it was the best."""
    best = []
    for place, value in enumerate(values, 1):
        number = machine.claim(1, place * every, (), finished_training=False)
        reported = machine.report(1, found(number, place * every, accuracy=value)) if number else None
        best.append(reported and reported[1])
        machine.validate({1})
    return best


@pytest.fixture
def rig() -> Rig:
    """A job of two workers that runs, and is evaluated every ten steps."""
    rig = Rig(KEEPING).servers("s0").workers("w0", "w1")
    policy = EvaluationPolicy(every_steps=10, metric="accuracy", patience=2, checkpoint_best=True)
    rig.submit(replace(job(evaluation=policy), consistency=shoal.Synchronous()))
    return rig.start("a", "w0", "w1")


def evaluations(rig: Rig) -> list[EvaluationEnded]:
    return [event for event in rig.machine.job("a").log.after(0) if isinstance(event, EvaluationEnded)]


# Whose turn it is.


def test_only_the_first_worker_to_reach_an_interval_evaluates() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10))
    assert machine.claim(1, 9, (2,), finished_training=False) == 0
    assert machine.claim(1, 13, (2,), finished_training=False) == 1
    assert machine.claim(2, 10, (1,), finished_training=False) == 0
    assert machine.report(1, found(1, loss=1.0)) == (found(1, loss=1.0), True)
    assert machine.claim(2, 19, (1,), finished_training=False) == 0, "that mark is done"
    assert machine.claim(2, 41, (1,), finished_training=False) == 2, "those in between are skipped"
    assert machine.claim(1, 50, (2,), finished_training=False) == 0, "one at a time"


def test_one_that_dies_meanwhile_is_not_waited_for() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10))
    assert machine.claim(1, 10, (2,), finished_training=False) == 1
    machine.release(1)
    assert machine.claim(2, 12, (), finished_training=False) == 0
    assert machine.claim(2, 20, (), finished_training=False) == 2
    assert machine.report(1, found(1, loss=1.0)) is None, "what the dead one found counts no more"
    assert machine.report(2, found(2, loss=1.0)) == (found(2, loss=1.0), True)


def test_at_the_end_the_last_one_that_is_finished_evaluates() -> None:
    machine = EvaluationSchedule(EvaluationPolicy())
    assert machine.claim(1, 10, (2, 3), finished_training=True) == 0
    machine.release(1)
    assert machine.claim(2, 10, (3,), finished_training=True) == 0
    assert machine.claim(3, 11, (2,), finished_training=True) == 1, "the other has said so, and is about to go"
    assert (
        EvaluationSchedule(EvaluationPolicy(every_steps=5, at_end=False)).claim(1, 10, (), finished_training=True) == 0
    )


def test_a_result_counts_once_and_only_from_its_claimant() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10))
    number = machine.claim(1, 10, (2,), finished_training=False)
    assert machine.report(2, found(number, loss=1.0)) is None
    assert machine.report(1, found(number + 1, loss=1.0)) is None
    assert machine.report(1, found(number, loss=1.0))
    assert machine.report(1, found(number, loss=1.0)) is None


# Which is the best, and when that is enough.


@pytest.mark.parametrize(
    ("policy", "values", "best"),
    [
        ({}, [0.5, 0.6, 0.6, 0.7], [True, True, False, True]),
        ({"mode": "min"}, [0.5, 0.6, 0.4], [True, False, True]),
        ({"min_delta": 0.1}, [0.5, 0.55, 0.65], [True, False, True]),
        ({}, [NAN, NAN, 0.1, NAN], [False, False, True, False]),
    ],
)
def test_which_is_the_best(policy: Mapping[str, Any], values: Sequence[float], best: list[bool]) -> None:
    assert evaluate(EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", **policy)), values) == best


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        *[(name, True) for name in ("loss", "val_loss", "top5_error", "logloss", "RMSE", "mse", "mae", "nll")],
        *[(name, True) for name in ("cross_entropy", "perplexity")],
        *[(name, False) for name in ("accuracy", "auc", "top5", "f1", "precision", "recall@10")],
    ],
)
def test_mode_auto_follows_from_the_name_of_the_metric(metric: str, less: bool) -> None:
    assert EvaluationPolicy(metric=metric).is_better(1.0, 2.0) is less
    assert EvaluationPolicy(metric=metric, mode="max").is_better(2.0, 1.0)


def test_patience_counts_those_since_the_best() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", patience=2))
    evaluate(machine, [0.5, 0.4, 0.6, 0.6])
    assert machine.stopping == ""
    assert machine.report(1, found(machine.claim(1, 50, (), finished_training=False), 50, accuracy=0.5))
    assert machine.stopping == "stopped early: accuracy was no better than 0.6 (step 30) in 2 evaluations"
    assert machine.claim(1, 60, (), finished_training=False) == 0, "only the one at the end follows"
    assert machine.claim(1, 60, (), finished_training=True) == 6


def test_a_job_that_is_finished_did_not_stop_early() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", patience=1))
    evaluate(machine, [0.5])
    machine.report(1, found(machine.claim(1, 12, (), finished_training=True), 12, accuracy=0.4))
    assert machine.stopping == ""


def test_a_run_that_gives_no_number_has_no_best_and_patience_ends() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", patience=2))
    assert evaluate(machine, [NAN, NAN]) == [False, False]
    assert machine.best is None
    assert machine.stopping == "stopped early: accuracy was no number in 2 evaluations"


@pytest.mark.parametrize("kept", [True, False])
def test_after_going_back_steps_that_were_evaluated_come_again(kept: bool) -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", patience=2))
    evaluate(machine, [0.5, 0.9, 0.4, 0.4])
    if kept:
        machine.checkpoint_committed(1, best=2)
    machine.restart()
    machine.validate(())
    assert machine.stopping == ""
    assert machine.best == (found(2, 20, accuracy=0.9) if kept else None), "its variables are lost, or are not"
    best = evaluate(machine, [0.5, 0.7, 0.8])
    assert best == ([False] * 3 if kept else [True] * 3)
    assert machine.stopping == "", "it learns, and has lost what it had learned"
    evaluate(machine, [0.0, 0.0, 0.0, 0.6, 0.8])
    assert machine.stopping == "stopped early: accuracy was no better than 0.8 (step 30) in 2 evaluations"


def test_a_repeated_claim_gets_the_same_answer() -> None:
    """The answer was lost, or the coordinator died behind it."""
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10))
    assert (
        machine.claim(1, 10, (2,), finished_training=False) == machine.claim(1, 10, (2,), finished_training=False) == 1
    )
    assert machine.claim(2, 10, (1,), finished_training=False) == 0
    machine.release(1)
    assert machine.claim(2, 20, (), finished_training=True) == machine.claim(2, 20, (), finished_training=True) == 2


def test_one_that_was_evaluating_when_it_came_to_its_end_evaluates_the_end() -> None:
    machine = EvaluationSchedule(EvaluationPolicy(every_steps=10))
    machine.claim(1, 10, (), finished_training=False)
    assert machine.claim(1, 10, (), finished_training=True) == 2
    assert machine.report(1, found(1, loss=1.0)) is None


def test_the_end_is_at_the_furthest_step_that_anybody_took() -> None:
    machine = EvaluationSchedule(EvaluationPolicy())
    machine.claim(1, 90, (2,), finished_training=True)
    machine.release(1)
    reported = machine.report(2, found(machine.claim(2, 60, (), finished_training=True), 60, loss=1.0))
    assert reported
    assert reported[0].step == 90


def test_it_goes_on_from_its_record() -> None:
    machine, again = (
        EvaluationSchedule(EvaluationPolicy(every_steps=10, metric="accuracy", patience=1)) for _ in range(2)
    )
    evaluate(machine, [0.5, 0.4])
    machine.claim(1, 30, (2,), finished_training=True)
    machine.expect_checkpoint(3)
    assert machine.cut_taken(3) == found(1, 10, accuracy=0.5)
    machine.checkpoint_committed(2, best=1)
    machine.expect_checkpoint(4)
    again.restore_from(machine.to_proto())
    again.validate({1})
    assert again.to_proto() == machine.to_proto()
    assert (again.latest, again.best, again.kept) == (machine.latest, machine.best, 2)


# In a job.


def test_a_job_reports_its_evaluations_and_stops_early(rig: Rig) -> None:
    for step, accuracy in [(10, 0.5), (20, 0.8), (30, 0.8), (40, 0.7)]:
        asked = rig.ask("a", "w0", step)
        assert not asked.stop
        assert rig.evaluate("a", "w0", asked.number, accuracy=accuracy).stop == (step == 40)
        rig.perform(step=step)
    status = rig.status("a")
    assert status.evaluation
    assert status.best
    assert (status.evaluation.number, status.evaluation.time) == (4, rig.now)
    assert status.best.values == {"accuracy": 0.8}
    assert [(event.worker, event.best) for event in evaluations(rig)] == [
        ("w0", True),
        ("w0", True),
        ("w0", False),
        ("w0", False),
    ]
    rig.crash()  # what was decided is known to the next coordinator
    assert rig.ask("a", "w1", 40).stop
    assert rig.report("a", "w1", step=40) is ReportAck.STOP_AFTER_BATCH
    assert rig.lease("a", "w0").name == "FINISHED"
    rig.workers("w2")
    assert rig.status("a").workers == ("w0", "w1")
    rig.leave("w1")
    assert rig.status("a").workers == ("w0",), "nobody takes the place of one that leaves now"
    asked = rig.ask("a", "w0", 41, finished_training=True)
    rig.evaluate("a", "w0", asked.number, accuracy=0.7)
    rig.finish("a", "w0")
    rig.perform(step=41)
    assert rig.state("a") is JobState.SUCCEEDED
    assert rig.status("a").reason == "stopped early: accuracy was no better than 0.8 (step 7) in 2 evaluations"
    best = rig.status("a").result().best
    assert best
    assert best.values == {"accuracy": 0.8}


def test_the_best_ones_checkpoint_is_taken_while_its_evaluator_waits_and_stays(rig: Rig) -> None:
    first = rig.ask("a", "w0", 10).number
    assert rig.evaluate("a", "w0", first, accuracy=0.5).wait
    rig.perform(step=10)
    assert not rig.evaluate("a", "w0", first, accuracy=0.5).wait, "the cut is made"
    written = [effect for effect in rig.performed if isinstance(effect, CommitCheckpoint)]
    assert [(it.cut.number, it.best.number if it.best else 0, it.keep) for it in written] == [(1, first, ())]
    rig.handle(CheckpointRequested("a"))
    rig.perform(step=12)
    [*_, later] = [effect for effect in rig.performed if isinstance(effect, CommitCheckpoint)]
    assert (later.cut.number, later.best, later.keep) == (2, None, (1,)), "another one, which leaves it"
    assert len(evaluations(rig)) == 1


def fail_checkpoint(rig: Rig) -> None:
    [effect] = [it for it in rig.pending if isinstance(it, ScanCheckpoints | TakeCut | CommitCheckpoint)]
    rig.pending.clear()
    rig.handle(CheckpointFailed(effect.job, "the disk is full", effect=effect.number))


def test_a_failed_checkpoint_of_the_best_is_retried_without_delaying_workers(rig: Rig) -> None:
    number = rig.ask("a", "w0", 10).number
    assert rig.evaluate("a", "w0", number, accuracy=0.5).wait
    fail_checkpoint(rig)
    assert not rig.evaluate("a", "w0", number, accuracy=0.5).wait
    rig.pass_time(12)
    rig.perform(step=14)
    [written] = [effect for effect in rig.performed if isinstance(effect, CommitCheckpoint)]
    assert written.best
    assert (written.best.number, written.cut.step) == (number, 14)
    assert rig.machine.job("a").best_checkpoint == 1


@pytest.mark.parametrize(
    ("mode", "waits"),
    [
        (shoal.Synchronous(), True),
        (shoal.Synchronous(backup_workers=1), False),
        (shoal.Asynchronous(), False),
        (shoal.BoundedStaleness(2), False),
    ],
    ids=str,
)
def test_it_holds_still_only_where_that_keeps_the_variables_as_they_are(mode: Consistency, waits: bool) -> None:
    rig = Rig(KEEPING).servers("s0").workers("w0", "w1")
    policy = EvaluationPolicy(every_steps=10, checkpoint_best=True)
    rig.submit(replace(job(evaluation=policy), consistency=mode))
    rig.start("a", "w0", "w1")
    assert rig.evaluate("a", "w0", rig.ask("a", "w0", 10).number, loss=0.5).wait is waits
    rig.perform(step=11)
    assert rig.machine.job("a").best_checkpoint == 1


# The learning rate.


def plateau_rig(mode: Consistency) -> Rig:
    """A job of two workers that halves its rate of 1 at the second evaluation in a row without an improvement."""
    rig = Rig(KEEPING).servers("s0", "s1").workers("w0", "w1")
    policy = EvaluationPolicy(every_steps=10, reduce_on_plateau=optim.ReduceOnPlateau(0.5, patience=1, minimum=0.3))
    rig.submit(replace(job(evaluation=policy, optimizer=optim.SGD(1.0)), consistency=mode))
    return rig.start("a", "w0", "w1")


def lose(rig: Rig, step: int, loss: float) -> bool:
    """Evaluates; returns whether the worker has to wait."""
    return bool(rig.evaluate("a", "w0", rig.ask("a", "w0", step).number, loss=loss).wait)


def rates(rig: Rig) -> list[float]:
    return [it.learning_rate.learning_rate for it in rig.pending if isinstance(it, SetLearningRate)]


@pytest.mark.parametrize(("mode", "waits"), [(shoal.Synchronous(), True), (shoal.Asynchronous(), False)], ids=str)
def test_a_plateau_reduces_the_rate_before_a_synchronous_job_goes_on(mode: Consistency, waits: bool) -> None:
    rig = plateau_rig(mode)
    assert [lose(rig, step, 0.5) for step in (10, 20)] == [False, False]
    assert lose(rig, 30, 0.7) is waits
    assert rates(rig) == [0.5]
    told = "the learning rate is reduced from 1 to 0.5: loss did not improve in 2 evaluations"
    assert rig.history("a")[-1][1] == told
    rig.crash()
    assert rig.evaluate("a", "w0", 3, loss=0.7).wait is waits, "the next coordinator has not heard from the servers"
    assert rates(rig) == [0.5], "only once"
    rig.perform()
    assert not rig.evaluate("a", "w0", 3, loss=0.7).wait
    assert [lose(rig, step, 0.5) for step in (40, 50)] == [False, waits]
    assert rates(rig) == [0.3], "no less than the minimum"
    rig.perform()
    assert not any(lose(rig, step, 0.5) for step in (60, 70, 80))


def test_a_restart_takes_the_rate_and_the_plateau_of_its_checkpoint() -> None:
    rig = plateau_rig(shoal.Synchronous())
    for step in (10, 20, 30, 40):
        lose(rig, step, 0.5)
        rig.perform()
    rig.handle(CheckpointRequested("a"))
    rig.perform(step=42)
    assert lose(rig, 50, 0.5)
    rig.perform()
    rig.kill("s0")
    rig.servers("s2").pass_time(61)
    rig.performed.clear()
    rig.start("a", "w0", "w1", step=42)
    [rate] = [it for it in rig.performed if isinstance(it, SetLearningRate)]
    assert rate.learning_rate == optim.ConstantLR(0.5), "that of the checkpoint, not the later 0.3"
    assert lose(rig, 50, 0.5), "as before the loss"
    assert rates(rig) == [0.3]


def test_a_restart_from_the_beginning_has_the_first_rate() -> None:
    rig = plateau_rig(shoal.Synchronous())
    for step in (10, 20, 30):
        lose(rig, step, 0.5)
        rig.perform()
    rig.kill("s0")
    rig.servers("s2").pass_time(61)
    rig.performed.clear()
    rig.start("a", "w0", "w1")
    [created] = [it for it in rig.performed if isinstance(it, CreateShards)]
    assert created.spec.optimizer == optim.SGD(1.0)
    assert not any(isinstance(it, SetLearningRate) for it in rig.performed)


def test_a_job_that_reduces_its_rate_takes_only_a_constant_from_users() -> None:
    rig = plateau_rig(shoal.Synchronous())
    with pytest.raises(errors.InvalidOptimizer, match="needs a constant rate, not the schedule step; give a number"):
        rig.handle(LearningRateRequested("a", optim.StepLR(1.0, 10)))
    rig.handle(LearningRateRequested("a", optim.ConstantLR(4.0)))
    rig.perform()
    for step in (10, 20, 30):
        lose(rig, step, 0.5)
    assert rates(rig) == [2.0]


@pytest.mark.parametrize("others", [0, 1])
def test_a_job_that_stops_early_ends_though_its_last_worker_dies(others: int) -> None:
    rig = Rig().servers("s0").workers("w0")
    rig.submit(job(workers=1, evaluation=EvaluationPolicy(every_steps=10, patience=1)))
    rig.start("a", "w0")
    for step in (10, 20):
        rig.evaluate("a", "w0", rig.ask("a", "w0", step).number, loss=0.5)
    rig.workers(*["w1", "w2"][:others])
    rig.leave("w0")
    assert rig.state("a") is JobState.SUCCEEDED
    assert rig.status("a").reason.endswith("; the final evaluation was lost with its worker")


def test_a_job_waits_for_the_checkpoint_of_its_last_evaluation() -> None:
    rig = Rig(KEEPING).servers("s0").workers("w0")
    policy = EvaluationPolicy(checkpoint_best=True)
    rig.submit(job(workers=1, evaluation=policy, checkpoints=shoal.CheckpointPolicy(every_s=0, at_end=False)))
    rig.start("a", "w0", samples=0)
    rig.evaluate("a", "w0", rig.ask("a", "w0", 3, finished_training=True).number, loss=1.0)
    rig.finish("a", "w0")
    assert rig.state("a") is JobState.RUNNING
    rig.perform(step=3)
    assert rig.state("a") is JobState.SUCCEEDED
    assert rig.checkpoint("a").number == 1


def test_a_metric_that_the_program_lacks_fails_the_job_and_lists_its_metrics(rig: Rig) -> None:
    number = rig.ask("a", "w0", 10).number
    rig.evaluate("a", "w0", number, loss=0.5, auc=0.5)
    assert rig.state("a") is JobState.FAILED
    assert "gives auc, loss, but the job asks for 'accuracy'" in rig.status("a").reason


def test_calls_of_a_worker_outside_the_job_are_refused(rig: Rig) -> None:
    rig.workers("w2")
    refused = "w2 has no assignment in job a, and had none"
    with pytest.raises(errors.Forbidden, match=refused):
        rig.ask("a", "w2", 10)
    with pytest.raises(errors.Forbidden, match=refused):
        rig.evaluate("a", "w2", 1, accuracy=1.0)
    assert not evaluations(rig)


def test_a_job_without_evaluation_policy_grants_no_claims() -> None:
    rig = Rig().servers("s0").workers("w0")
    rig.submit(job(workers=1))
    rig.start("a", "w0")
    assert (rig.ask("a", "w0", 10).number, rig.ask("a", "w0", 10, finished_training=True).number) == (0, 0)


def test_a_cluster_without_a_folder_cannot_keep_the_best() -> None:
    rig = Rig().servers("s0").workers("w0")
    with pytest.raises(errors.InvalidJob, match="no checkpoint storage"):
        rig.submit(job(evaluation=EvaluationPolicy(checkpoint_best=True)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"every_steps": -1}, "every_steps of evaluation is -1"),
        ({"patience": True, "every_steps": 1}, "patience of evaluation is True"),
        ({"at_end": 1}, "at_end of evaluation is 1"),
        ({"metric": ""}, "metric of evaluation is ''"),
        (
            {"metric": "score"},
            "'score', whose name does not say whether smaller or larger values are better; set mode to",
        ),
        ({"mode": "most"}, "mode of evaluation is 'most'"),
        ({"min_delta": NAN}, "min_delta of evaluation is nan"),
        ({"at_end": False}, "neither every_steps nor at_end"),
        ({"patience": 3}, "patience without every_steps"),
    ],
)
def test_invalid_policies_are_refused(fields: Mapping[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidJob, match=said):
        EvaluationPolicy(**fields)


def test_a_policy_travels_with_its_job() -> None:
    policy = EvaluationPolicy(
        every_steps=7, at_end=False, metric="auc", mode="min", patience=3, min_delta=0.5, checkpoint_best=True
    )
    spec = job(evaluation=policy)
    assert shoal.Job.from_proto(spec.to_proto()).evaluation == policy
    assert shoal.Job.from_proto(job().to_proto()).evaluation is None
    with pytest.raises(errors.InvalidJob, match="does not apply to session jobs"):
        shoal.Job(evaluation=policy)

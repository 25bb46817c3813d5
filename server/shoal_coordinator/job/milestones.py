"""Evaluations and checkpoints of a job: what one means for the other, and for the job. Pure: no clock, no I/O.

What is due, under way and whole, `Evaluating` and `Checkpointing` know, each for itself, and when a checkpoint begins
`JobLife` says. Here is what follows from each event of them: the best evaluation asks for a checkpoint, which then says
that it is of that evaluation; who evaluated too much in vain ends the job; and a job that is closing ends with its last
checkpoint.
"""

from dataclasses import replace

from shoal import errors
from shoal._training.participant import Verdict
from shoal.consistency import Synchronous
from shoal.events import Evaluated
from shoal.status import Evaluation, JobState
from shoal_coordinator.job.checkpointing import NO_FOLDER
from shoal_coordinator.job.life import JobLife
from shoal_coordinator.messages.answers import Asked, Attempt
from shoal_coordinator.messages.effects import Effect, TakeCut, WriteCheckpoint
from shoal_coordinator.messages.events import CheckpointWritten, CutMade

# Evaluations.


def ask_evaluation(job: JobLife, worker: str, step: int, *, through: bool) -> Asked:
    """Gives a worker the evaluation that is due at its step, if one is and nobody else has it."""
    if job.evaluating is None or job.state is not JobState.RUNNING:
        return Asked()
    own = job.crew.active[worker].assignment
    others = {part.assignment for part in job.crew.active.values()} - {own}
    return Asked(job.evaluating.ask(own, step, others, through=through), stop=bool(job.stopping))


def report_evaluation(job: JobLife, worker: str, result: Evaluation, now: float) -> tuple[Verdict, list[Effect]]:
    """Takes what a worker has found, and says what follows for it."""
    evaluating = job.evaluating
    if evaluating is None:
        return Verdict(), []
    if lack := evaluating.lacks(result):
        return Verdict(stop=True), job.fail(lack, now)
    effects: list[Effect] = []
    if reported := evaluating.report(job.crew.active[worker].assignment, replace(result, time=now)):
        found, is_best = reported
        job.log.append(Evaluated(job.log.next, now, worker, found, is_best))
        if job.stopping:
            job.wait_for(job.stopping, now)
        if is_best and evaluating.checkpoints_best and job.checkpoints.possible:
            evaluating.expect_checkpoint(job.checkpoints.request(now))
            effects = job.checkpoint_when_due(now)
    # Where others go on meanwhile, it would hold still for nothing.
    wait = evaluating.awaits_cut and not job.checkpoints.failure and _stands_still(job)
    return Verdict(wait, stop=bool(job.stopping)), effects


def _stands_still(job: JobLife) -> bool:
    """Whether the variables stay what they are as long as one worker takes no step."""
    mode = job.spec.consistency
    return isinstance(mode, Synchronous) and not mode.backup_workers


# Checkpoints, in the order in which they go on.


def request_checkpoint(job: JobLife, now: float) -> tuple[Attempt, list[Effect]]:
    """Takes one more, now or when the one under way is over."""
    if not job.checkpoints.possible:
        raise errors.StorageFailed(NO_FOLDER)
    if job.state is not JobState.RUNNING:
        raise errors.NotPlaced(f"job {job.ref.name} is {job.state.value}; only a running one is saved")
    attempt = Attempt(job.checkpoints.request(now), job.log.last)
    return attempt, job.checkpoint_when_due(now)


def checkpoints_counted(job: JobLife, largest: int, *, last: bool = False) -> list[Effect]:
    """What the folder has under this name is known, so that the checkpoint under way can have a number.

    Args:
        job: whose.
        largest: number in the folder.
        last: a server with shards of it is going, so the job goes back to this one.
    """
    if job.plan.placement is None:
        return []
    number = job.checkpoints.take_number(above=largest)
    return [TakeCut(job.ref, job.plan.placement.epoch, job.plan.servers, number, last)]


def cut_made(job: JobLife, cut: CutMade) -> list[Effect]:
    """All servers write their part."""
    if job.plan.placement is None:
        return []
    evaluating = job.evaluating
    best = evaluating.cut_made(job.checkpoints.attempt) if evaluating else None
    keep = (evaluating.kept,) if evaluating and evaluating.kept else ()
    return [WriteCheckpoint(job.ref, job.plan.placement, job.spec, cut, best, keep)]


def checkpoint_written(job: JobLife, written: CheckpointWritten, now: float) -> list[Effect]:
    """The checkpoint that was under way is whole."""
    saved = written.saved
    job.checkpoints.written(saved, written.removed)
    if job.evaluating and written.best:
        job.evaluating.checkpoint_written(saved.number, written.best)
    job.checkpoint_ended(job.checkpoints.attempt, saved, "", now)
    return _after_checkpoint(job, now)


def checkpoint_failed(job: JobLife, reason: str, now: float) -> list[Effect]:
    """The checkpoint that was under way was given up; those that matter the most are tried again."""
    job.checkpoints.failed(reason)
    of_best = job.evaluating is not None and job.evaluating.checkpoint_failed(job.checkpoints.attempt)
    again = (of_best or job.closing) and not job.checkpoints.pending and job.checkpoints.request_again(now)
    if of_best and job.evaluating and (again or job.checkpoints.pending):
        job.evaluating.expect_checkpoint(job.checkpoints.pending_attempt)
    job.checkpoint_ended(job.checkpoints.attempt, None, reason, now)
    return _after_checkpoint(job, now)


def _after_checkpoint(job: JobLife, now: float) -> list[Effect]:
    effects = job.checkpoint_when_due(now)  # another one was asked for meanwhile
    return effects + job.end_when_saved(now)

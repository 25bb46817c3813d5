"""Notices about the waits of a session: for other ranks, for servers, or for more sessions."""

from collections.abc import Callable, Sequence

from shoal import errors
from shoal._session.reports import Reports
from shoal._session.step_times import StepTimes
from shoal._system.waits import Wait, WaitWatch
from shoal._training import Pipeline
from shoal._training.participant import Participant
from shoal.status import JobMember, JobState, JobStatus

# Ranks that a line names; it counts the others.
_MOST_NAMED = 5


class SessionWaits:
    """Tells a person when a call of a session waits for other ranks or for servers. A thread does it.

    The thread also sends the reports, so that they never delay a call of the session.

    Args:
        participant: the session's part in its job.
        parameters: its pulls and pushes.
        times: its calls in progress.
        reports: its reports.
        clock: returns seconds, as for `times`.
    """

    def __init__(
        self,
        participant: Participant,
        parameters: Pipeline,
        times: StepTimes,
        reports: Reports,
        clock: Callable[[], float],
    ) -> None:
        self._participant, self._parameters, self._times = participant, parameters, times
        self._watch = WaitWatch(self._current, self._detail, clock=clock, each=reports.flush)
        self._watch.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._watch.stop()

    def _current(self) -> Wait | None:
        if (waiting := self._times.waiting) is None:
            return None
        phase, since = waiting
        own = self._participant
        return Wait(f"{phase} of step {self._parameters.step} by {own.worker} (rank {own.rank}, job {own.job})", since)

    def _detail(self) -> str:
        lead, waiting = self._participant.spec.consistency.lead, self._times.waiting
        if waiting and waiting[0] == "batches":
            return "for a range of samples; the other sessions have leased all that are left"
        if lead is not None and waiting:
            first = self._parameters.step - lead + (waiting[0] == "push")
            if slow := ranks_behind(self._participant.status(retry_for_s=0).members, self._participant.rank, first):
                return f"for {slow}"
        return "for the servers; no other rank is behind"


def ranks_behind(members: Sequence[JobMember], own_rank: int, step: int) -> str:
    """Returns the ranks that have not reached a step, in words; empty if all have.

    Args:
        members: the members of the job.
        own_rank: the rank that waits.
        step: the step that the others have to reach.
    """
    slow = sorted((it.step, it.rank, it.worker) for it in members if it.state == "present" and it.step < step)
    named = [f"rank {rank} ({worker}, at step {at})" for at, rank, worker in slow if rank != own_rank]
    left = len(named) - _MOST_NAMED
    return " and ".join([", ".join(named[:_MOST_NAMED]), *([f"{left} more"] if left > 0 else [])])


def entry_detail(participant: Participant) -> str:
    """Returns what a session waits for that enters its job, in words."""
    try:
        status = participant.status(retry_for_s=0)
    except errors.Unreachable:
        return "for the coordinator"
    return entry_words(status, participant.worker)


def entry_words(status: JobStatus, own: str = "") -> str:
    """Returns what an entry waits for, in words: a place in a full job, more sessions, which are named, or servers.

    Args:
        status: status of the job.
        own: member id of the session that enters; empty if the caller only waits for the job to run.
    """
    present, workers = [it for it in status.members if it.state == "present"], status.job.workers
    named = "; ".join(f"{it.worker}, rank {it.rank}" for it in present[:_MOST_NAMED])
    more = f" and {left} more" if (left := len(present) - _MOST_NAMED) > 0 else ""
    opened = f"open: {named or 'none'}{more}"
    if own and len(present) >= workers and all(it.worker != own for it in present):
        return f"for the place of a session that has died, if one has (the job is full; {opened})"
    if status.job.is_session and len(present) < workers and status.state is not JobState.RUNNING:
        lacking = workers - len(present)
        return f"for {lacking} more session{'s' if lacking > 1 else ''} of {workers} ({opened})"
    if status.reason:
        awaited = status.reason.removeprefix("waiting ")
        return awaited if awaited.startswith("for ") else f"to run ({awaited})"
    if status.state is JobState.STARTING and named and not status.job.is_session:
        return f"for its workers to load the program: {named}{more}"
    return f"for the servers (the job is {status.state.value})"


__all__ = ["SessionWaits", "entry_detail", "entry_words", "ranks_behind"]

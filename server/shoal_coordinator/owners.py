"""Owners of jobs: the check that a submitter changes only its own jobs."""

from shoal import errors
from shoal._security import AccessRole, Principal
from shoal_coordinator.coordinator import Coordinator


def check_owner(coordinator: Coordinator, caller: Principal | None, job: str) -> None:
    """Checks that a caller may change a job, or take part in it.

    The owner of a job is who submitted it: the name of a token, which several tokens may have. Admins may change all
    jobs. Workers and the holders of tickets are checked by their role and their ticket.

    Args:
        coordinator: The shell.
        caller: The caller. None, in a cluster that asks for no tokens, passes.
        job: The name of the job.

    Raises:
        UnknownJob: The job does not exist.
        Forbidden: The job is another submitter's.
    """
    if caller is None or caller.role is not AccessRole.SUBMITTER:
        return
    with coordinator.reading() as (cluster, _now):
        owner = cluster.job(job).submission.submitter
    if owner != caller.name:
        raise _refusal(caller, job, owner)


def check_name(coordinator: Coordinator, caller: Principal | None, job: str) -> None:
    """Checks that a submission does not replace the ended job of another submitter.

    Raises:
        Forbidden: The job of this name is another submitter's.
    """
    try:
        check_owner(coordinator, caller, job)
    except errors.UnknownJob:
        return


def _refusal(caller: Principal, job: str, owner: str) -> errors.Forbidden:
    whose = f"the job of {owner!r}" if owner else "a job without a known owner"
    return errors.Forbidden(
        f"{caller} may not change {job}, which is {whose}; ask its owner or an admin, or choose another name", job=job
    )


__all__ = ["check_name", "check_owner"]

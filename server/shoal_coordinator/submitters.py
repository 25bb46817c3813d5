"""The checks that a submitter changes only its own jobs, and does not continue the checkpoints of others (no I/O)."""

from shoal import errors
from shoal._checkpoint import Manifest
from shoal._security import AccessRole, Principal
from shoal_coordinator.cluster import Cluster


def is_submitter(caller: Principal | None) -> bool:
    """Returns whether a caller may change only its own jobs."""
    return caller is not None and caller.role is AccessRole.SUBMITTER


def check_submitter(cluster: Cluster, caller: Principal | None, job: str, advice: str = "ask an admin") -> None:
    """Checks that a caller may change a job, or take part in it.

    A job belongs to its submitter, which is the name of a token. Several tokens may have the same name. Admins may
    change all jobs. This check lets workers and the holders of tickets pass: their roles and tickets are checked
    elsewhere.

    Args:
        cluster: The cluster.
        caller: The caller. None, as in a cluster that asks for no tokens, is not checked.
        job: The name of the job.
        advice: What the caller can do if the job is another submitter's.

    Raises:
        UnknownJob: The job does not exist.
        Forbidden: The job is another submitter's.
    """
    if caller is None or not is_submitter(caller):
        return
    submitter = cluster.job(job).submission.submitter
    if submitter != caller.name:
        whose = f"the job of {submitter!r}" if submitter else "a job whose submitter is not known"
        raise errors.Forbidden(f"{caller} may not change {job}, which is {whose}; {advice}", job=job)


def check_submission_name(cluster: Cluster, caller: Principal | None, job: str) -> None:
    """Checks that a submission does not replace the ended job of another submitter.

    Args:
        cluster: The cluster.
        caller: The caller. None is not checked.
        job: The name of the submitted job.

    Raises:
        Forbidden: The job of this name is another submitter's.
    """
    try:
        check_submitter(cluster, caller, job, "ask an admin, or choose another name")
    except errors.UnknownJob:
        return


def check_checkpoints(caller: Principal | None, job: str, newest: Manifest | None) -> None:
    """Checks that a job would not continue the checkpoints of another submitter's earlier job of its name.

    Args:
        caller: The caller. Only submitters are checked.
        job: The name of the submitted job.
        newest: The newest checkpoint of this name. One whose submitter is not known passes.

    Raises:
        Forbidden: The checkpoint is another submitter's.
    """
    if caller is not None and is_submitter(caller) and newest and newest.belongs_to_another(caller.name):
        raise errors.Forbidden(
            f"{caller} may not submit {job}: the checkpoint {job}/{newest.number} is one of {newest.submitter!r}; "
            "choose another name, or ask an admin to remove the checkpoints of this name",
            job=job,
        )


__all__ = ["check_checkpoints", "check_submission_name", "check_submitter", "is_submitter"]

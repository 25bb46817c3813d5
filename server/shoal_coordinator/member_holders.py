"""The checks that a caller speaks only for its own members, and gets tickets only for them (no I/O)."""

from functools import partial

from shoal import errors
from shoal._security import MEMBER_ROLES, AccessRole, Principal
from shoal_coordinator.cluster import Cluster
from shoal_coordinator.decision import Check
from shoal_coordinator.submitters import check_submitter


def check_member(cluster: Cluster, caller: Principal | None, member: str, incarnation: int) -> None:
    """Checks that a caller may speak for a member.

    A member belongs to the name of the token, or of the certificate, with which it registered. Several processes may
    share a name, so the caller must also show the secret that the process got when it registered. Admins may speak for
    all members. The holder of a ticket is checked by its ticket.

    Args:
        cluster: The cluster.
        caller: The caller. None, as in a cluster that asks for no tokens, is not checked.
        member: The member id. An unknown one passes, because the state machine refuses it.
        incarnation: The incarnation of the member that the request names.

    Raises:
        Forbidden: The member is another caller's.
        Fenced: The caller was the member in an earlier incarnation, and names that incarnation.
        SecretRefused: The secret is that of an earlier incarnation, and the request names another one.
    """
    if caller is None or caller.job or caller.role is AccessRole.ADMIN:
        return
    found = cluster.members.find(member)
    if found is None:
        return
    role, holder = found.role.value, found.registration.holder
    if caller.role not in MEMBER_ROLES[role] or (holder and caller.name != holder):
        raise errors.Forbidden(
            f"{caller} may not speak for {role} {member!r}, which {holder or 'another process'} registered; use the "
            "token of its process",
            member=member,
        )
    if not found.registration.has_secret:  # it registered with an earlier version
        return
    if caller.member is None or caller.member.member != member:
        shown = f"that of {caller.member.member!r}" if caller.member else "none"
        raise errors.Forbidden(
            f"{caller} may not speak for {role} {member!r} without the secret of its registration, and has shown "
            f"{shown}; register under another member id, and show the secret of that registration",
            member=member,
        )
    if caller.member.incarnation != found.incarnation:
        if caller.member.incarnation == incarnation:
            cluster.members.check(*caller.member)  # raises Fenced
        raise errors.SecretRefused(
            f"{caller} speaks for incarnation {incarnation} of {role} {member!r} with the secret of incarnation "
            f"{caller.member.incarnation}; register again",
            member=member,
        )


def changes(caller: Principal | None, job: str, member: str = "", incarnation: int = 0) -> Check:
    """Returns the check of an event that changes a job.

    Args:
        caller: The caller. None, as in a cluster that asks for no tokens, is not checked.
        job: The name of the job.
        member: The member that takes part in the job; empty for a call of its submitter.
        incarnation: The incarnation of the member that the request names.

    Returns:
        The check. It raises as `check_submitter` and `check_member`.
    """

    def check(cluster: Cluster) -> None:
        check_submitter(cluster, caller, job)
        check_member(cluster, caller, member, incarnation)

    return check


def speaks_for(caller: Principal | None, member: str, incarnation: int) -> Check:
    """Returns a check of an event of a member; it takes the same arguments and raises as `check_member`.

    Args:
        caller: The caller.
        member: The member id.
        incarnation: The incarnation of the member that the request names.
    """
    return partial(check_member, caller=caller, member=member, incarnation=incarnation)


def check_assigned(cluster: Cluster, caller: Principal, job: str, member: str) -> None:
    """Checks that a worker takes part in a job, or that a server has shards of it, before it gets a ticket for the job.

    A server that has only backups of its shards gets one if it has to make a copy.

    Args:
        cluster: The cluster.
        caller: The caller. Only those of the roles worker and server are checked.
        job: The name of the job.
        member: The member id of the worker or the server; empty for a reader.

    Raises:
        UnknownJob: The job does not exist.
        Forbidden: The worker has no assignment in the job, or the server calls no other server for it.
    """
    if caller.role not in {AccessRole.WORKER, AccessRole.SERVER}:
        return
    found = cluster.job(job)
    if caller.role is AccessRole.WORKER:
        who, assigned = "workers that take part in", bool(member) and found.has_worker(member)
    else:
        # A backup needs one to make a copy of its own, before it becomes the primary.
        senders = {server.member for group in found.copies.groups for server in (group.primary, group.sender)}
        who, assigned = "servers with shards of", member in senders
    if not assigned:
        raise errors.Forbidden(f"{caller} gets tickets only for {who} {job}; readers use their own tokens", job=job)


def check_ticket(cluster: Cluster, caller: Principal, job: str, member: str, incarnation: int) -> AccessRole:
    """Checks that a caller may get a ticket.

    Args:
        cluster: The cluster.
        caller: The caller.
        job: The name of the job that the ticket is for.
        member: The member id of the participant or the server; empty for a reader.
        incarnation: The incarnation of the member.

    Returns:
        The access role of the ticket.

    Raises:
        UnknownJob: The job does not exist.
        Fenced: There is no such member, or it has another incarnation.
        Forbidden: The caller is not the process of the member, or may not take part in the job.
    """
    cluster.job(job)  # raises UnknownJob
    role = cluster.members.check(member, incarnation).role.value if member else ""
    if role:
        check_submitter(cluster, caller, job)
        check_member(cluster, caller, member, incarnation)
    check_assigned(cluster, caller, job, member)
    if role and caller.role not in MEMBER_ROLES[role]:
        raise errors.Forbidden(f"{caller} gets no ticket for {role} {member!r}; its own process does")
    if role == "server":
        return AccessRole.PEER
    return AccessRole.TRAINER if role else AccessRole.OBSERVER


__all__ = ["changes", "check_assigned", "check_member", "check_ticket", "speaks_for"]

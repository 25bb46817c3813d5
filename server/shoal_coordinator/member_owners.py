"""The check that a caller speaks only for members that it has registered."""

from shoal import errors
from shoal._security import AccessRole, Principal
from shoal_coordinator.coordinator import Coordinator

_USERS = frozenset({AccessRole.ADMIN, AccessRole.SUBMITTER})
# The access roles whose processes may be a member of each role.
MEMBER_ROLES = {
    "server": frozenset({AccessRole.SERVER}),
    "worker": frozenset({AccessRole.WORKER}),
    "session": _USERS,
}


def check_member(coordinator: Coordinator, caller: Principal | None, member: str) -> None:
    """Checks that a caller may speak for a member.

    A member belongs to the name of the token, or of the certificate, with which it registered. Several processes may
    share a name. Admins may speak for all members. The holder of a ticket is checked by its ticket.

    Args:
        coordinator: The shell.
        caller: The caller. None, as in a cluster that asks for no tokens, is not checked.
        member: The member id. An unknown one passes, because the state machine refuses it.

    Raises:
        Forbidden: The member is another caller's.
    """
    if caller is None or caller.job or caller.role is AccessRole.ADMIN:
        return
    with coordinator.reading() as (cluster, _now):
        found = cluster.members.find(member)
        if found is None:
            return
        role, owner = found.role.value, found.registration.owner
    if caller.role not in MEMBER_ROLES[role] or (owner and caller.name != owner):
        raise errors.Forbidden(
            f"{caller} may not speak for {role} {member!r}, which {owner or 'another process'} registered; use the "
            "token of its process",
            member=member,
        )


def check_assigned(coordinator: Coordinator, caller: Principal, job: str, member: str) -> None:
    """Checks that a worker takes part in a job, before it gets a ticket for the job.

    Args:
        coordinator: The shell.
        caller: The caller. Only those of the role worker are checked.
        job: The name of the job.
        member: The member id of the worker; empty for a reader.

    Raises:
        Forbidden: The worker has no assignment in the job.
    """
    if caller.role is not AccessRole.WORKER:
        return
    with coordinator.reading() as (cluster, _now):
        assigned = bool(member) and cluster.job(job).employs(member)
    if not assigned:
        raise errors.Forbidden(
            f"{caller} gets tickets only for workers that take part in {job}; readers use their own tokens", job=job
        )


__all__ = ["MEMBER_ROLES", "check_assigned", "check_member"]

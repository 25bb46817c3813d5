"""Permissions: the table of the calls that each access role may make, and the other rules about access roles.

A call that is not in the table is refused. Anybody may make health checks: their entries name no role.

A caller must pass further checks. Those that compare only the caller and the request are here, too. The others need the
state of the cluster, so the coordinator makes them, under the lock under which it handles the call. All roles that they
name are in this module:

- `check_permitted`, by `PERMISSIONS`: whether the caller may make this call at all.
- `check_own`: the holder of a ticket speaks for the ticket's job, member and incarnation only.
- `MEMBER_ROLES`, in `shoal_coordinator.api.tokens`: who registers as a server, a worker or a session.
- `shoal_coordinator.member_holders`: a caller speaks only for members that it has registered, unless it is an admin.
  It shows this by its name and by the secret of the registration (`member_secrets`).
  A worker or a server gets tickets only for jobs that it takes part in, and a session only for jobs of its submitter.
- `shoal_coordinator.submitters`: a submitter changes only its own jobs, and continues only its own checkpoints.
- `shoal_coordinator.groups.registry`: the ranks of an elastic group have tokens of one name.
- `PAGE_ROLES`, in `shoal_coordinator.logins`: who logs in to the page. Each of its paths then needs the permission for
  a call.
- `shoal_worker.allowed_programs`: whose jobs may have a worker run which program (`--allow-program`).
"""

from collections.abc import Mapping

from shoal import errors
from shoal._security.principal import AccessRole, Principal

_ADMIN, _SUBMITTER, _READER = AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.READER
_WORKER, _SERVER, _COORDINATOR = AccessRole.WORKER, AccessRole.SERVER, AccessRole.COORDINATOR
_TRAINER, _OBSERVER, _PEER = AccessRole.TRAINER, AccessRole.OBSERVER, AccessRole.PEER

_USERS = frozenset({_ADMIN, _SUBMITTER})
_READERS = _USERS | {_READER}
# A session is a member, too. It registers with its user's token.
_MEMBERS = _USERS | {_WORKER, _SERVER}
# Roles that may make the calls of a participant of a job. A daemon reports for its trainer.
_PARTICIPANTS = _USERS | {_WORKER, _TRAINER}
_COORDINATOR_ONLY = frozenset({_COORDINATOR})

# The access roles whose processes may be a member of each role.
MEMBER_ROLES: Mapping[str, frozenset[AccessRole]] = {
    "server": frozenset({_SERVER}),
    "worker": frozenset({_WORKER}),
    "session": _USERS,
}
# The access roles of people. The page accepts no tokens of processes, and no tickets.
PAGE_ROLES = (_ADMIN, _SUBMITTER, _READER)

_BY_SERVICE: dict[str, dict[str, frozenset[AccessRole]]] = {
    "shoal.v1.Coordinator": {
        "Register": _MEMBERS,
        "Heartbeat": _MEMBERS,
        "Attend": MEMBER_ROLES["session"],
        "Leave": _MEMBERS,
        "Drain": frozenset({_ADMIN, _SERVER}),
        "DrainServer": frozenset({_ADMIN}),
        "GetStatus": _READERS | {_WORKER, _SERVER},
    },
    "shoal.v1.Jobs": {
        "Submit": _USERS,
        "Cancel": _USERS,
        "Drop": _USERS,
        "TakeCheckpoint": _USERS,
        "SetLearningRate": _USERS,
        "List": _READERS,
        # A daemon reads no jobs. Its trainers do, with their tickets.
        "Get": _READERS | {_TRAINER},
        "Watch": _READERS,
        "GetData": _READERS,
        "GetTimings": _READERS,
        "GetPlacement": _READERS | {_TRAINER, _OBSERVER},
        "Describe": _PARTICIPANTS,
        "Join": _PARTICIPANTS,
        "Lease": _PARTICIPANTS,
        "ClaimEvaluation": _PARTICIPANTS,
        "ReportEvaluation": _PARTICIPANTS,
        "Report": _PARTICIPANTS,
        "Finish": _PARTICIPANTS,
    },
    "shoal.v1.Groups": {
        "Join": _USERS,
        "Heartbeat": _USERS,
        "ListGroups": _READERS,
        "GetGroup": _READERS,
    },
    "shoal.v1.Tokens": {
        # Not with a ticket: otherwise its holder could prolong it.
        "GetTicket": _READERS | {_WORKER, _SERVER},
        "GetLoginLink": _READERS,
        "CreateToken": frozenset({_ADMIN}),
        "RevokeToken": frozenset({_ADMIN}),
        "ListTokens": frozenset({_ADMIN}),
    },
    "shoal.v1.ParameterServer": {
        "Attach": frozenset({_TRAINER, _OBSERVER, _PEER}),
        "Pull": frozenset({_TRAINER, _OBSERVER}),
        "Push": frozenset({_TRAINER}),
        "Commit": frozenset({_TRAINER}),
        "Assign": frozenset({_TRAINER}),
        "ShareNorm": frozenset({_PEER}),
        "CreateShards": _COORDINATOR_ONLY,
        "DropShards": _COORDINATOR_ONLY,
        "AdmitWorkers": _COORDINATOR_ONLY,
        "FenceWorkers": _COORDINATOR_ONLY,
        "ReleaseWorkers": _COORDINATOR_ONLY,
        "SetRate": _COORDINATOR_ONLY,
        "AddBackup": _COORDINATOR_ONLY,
        "DropBackup": _COORDINATOR_ONLY,
        "DropCopy": _COORDINATOR_ONLY,
        "SplitGroup": _COORDINATOR_ONLY,
        "Promote": _COORDINATOR_ONLY,
        "HoldCommits": _COORDINATOR_ONLY,
        "ResumeCommits": _COORDINATOR_ONLY,
        "Save": _COORDINATOR_ONLY,
        "CollectFiles": _COORDINATOR_ONLY,
        "Restore": _COORDINATOR_ONLY,
    },
    # Not a gRPC service: /metrics of each role.
    "http": {"metrics": _READERS},
    # Probes have no token. They learn only whether the process is ready.
    "grpc.health.v1.Health": {"Check": frozenset()},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _READERS},
}

PERMISSIONS: Mapping[str, frozenset[AccessRole]] = {
    f"{service}/{method}": roles for service, methods in _BY_SERVICE.items() for method, roles in methods.items()
}
# The calls that anybody may make.
OPEN_CALLS = frozenset(call for call, roles in PERMISSIONS.items() if not roles)


# What users do with a call, and the command for it. Other calls are named in refusals as they are.
_USES = {
    "Submit": "submit jobs (`shoal submit`)",
    "Cancel": "cancel jobs (`shoal cancel`)",
    "Drop": "drop jobs (`shoal drop`)",
    "TakeCheckpoint": "take checkpoints (`shoal checkpoint`)",
    "SetLearningRate": "set learning rates (`shoal set-learning-rate`)",
    "List": "list jobs (`shoal jobs`)",
    "Watch": "follow jobs (`shoal wait`, `shoal logs`)",
    "GetData": "read the data accounts of jobs (`shoal data`)",
    "GetTimings": "read timings (`shoal timings`)",
    "ListGroups": "list groups (`shoal groups`)",
    "GetGroup": "read the timings of groups (`shoal timings`)",
    "GetLoginLink": "log in to the page (`shoal page`)",
    "DrainServer": "drain servers (`shoal drain`)",
    "CreateToken": "make tokens (`shoal token create`)",
    "RevokeToken": "revoke tokens (`shoal token revoke`)",
    "ListTokens": "list tokens (`shoal token ls`)",
}


def check_permitted(principal: Principal, call: str) -> None:
    """Checks that a caller may make a call.

    Args:
        principal: the caller.
        call: SERVICE/METHOD.

    Raises:
        Forbidden: the caller's role may not make this call.
    """
    allowed = PERMISSIONS.get(call, frozenset())
    if principal.role not in allowed and call not in OPEN_CALLS:
        who = ", ".join(sorted(role.value for role in allowed)) or "nobody"
        name = call.rpartition("/")[2]
        raise errors.Forbidden(
            f"{principal} may not {_USES.get(name, f'call {name}')}; only these roles may: {who}. Use a token of one "
            "of these roles",
            call=call,
            role=principal.role.value,
        )


def check_own(principal: Principal | None, job: str, member: str, incarnation: int, *, reading: bool = True) -> None:
    """Checks that the holder of a ticket acts only for the job, the member and the incarnation that the ticket names.

    Args:
        principal: the caller. None, and a caller without a ticket, are not checked.
        job: the job that the request names.
        member: the member that the request names; empty for a reader.
        incarnation: the incarnation of the member that the request names.
        reading: whether the request only reads. A request that changes something must name the ticket's member.

    Raises:
        Forbidden: the ticket is for another job, member or incarnation.
    """
    if principal is None or not principal.job:
        return
    reads_only = reading and not member and not incarnation
    acts_for_itself = (principal.name, principal.incarnation) == (member, incarnation) and principal.role in {
        _TRAINER,
        _PEER,
    }
    if principal.job == job and (reads_only or acts_for_itself):
        return
    raise errors.Forbidden(
        f"the ticket is for {principal.name!r} (incarnation {principal.incarnation}) and job {principal.job!r}; the "
        f"request names {member!r} (incarnation {incarnation}) and job {job!r}",
        job=job,
    )


__all__ = ["MEMBER_ROLES", "OPEN_CALLS", "PAGE_ROLES", "PERMISSIONS", "check_own", "check_permitted"]

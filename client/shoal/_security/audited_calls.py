"""Table of the calls that audit logs record: for each RPC of the contract, what is recorded of its permitted calls.

Refused calls are recorded for every RPC: those with a status of `REFUSALS`. Roles record them, and all others that this
table names, up to a number a second (`shoal._role.audit_log`).
"""

import enum
from collections.abc import Mapping


class Audited(enum.Enum):
    """What an audit log records of the permitted calls of an RPC.

    Attributes:
        ALWAYS: each call. It changes the cluster, a job or somebody's rights.
        FIRST: the first call of a caller with one outcome, and then one an hour. A process repeats the call while it
            waits, or to renew what it got.
        REFUSED: none. The call only reads, or is part of each step or heartbeat.
    """

    ALWAYS = "always"
    FIRST = "first"
    REFUSED = "refused"


_ALWAYS, _FIRST, _REFUSED = Audited.ALWAYS, Audited.FIRST, Audited.REFUSED

_BY_SERVICE: dict[str, dict[str, Audited]] = {
    "shoal.v1.Coordinator": {
        "Register": _ALWAYS,
        "Heartbeat": _REFUSED,
        "Attend": _REFUSED,
        "Leave": _ALWAYS,
        "Drain": _ALWAYS,
        "DrainServer": _ALWAYS,
        "GetStatus": _REFUSED,
    },
    "shoal.v1.Jobs": {
        "Submit": _ALWAYS,
        "Cancel": _ALWAYS,
        "Drop": _ALWAYS,
        "TakeCheckpoint": _ALWAYS,
        "SetLearningRate": _ALWAYS,
        "List": _REFUSED,
        "Get": _REFUSED,
        "Watch": _REFUSED,
        "GetData": _REFUSED,
        "GetTimings": _REFUSED,
        "GetPlacement": _REFUSED,
        "Describe": _ALWAYS,
        "Join": _FIRST,
        "Lease": _REFUSED,
        "ClaimEvaluation": _FIRST,
        "ReportEvaluation": _FIRST,
        "Report": _REFUSED,
        "Finish": _ALWAYS,
    },
    "shoal.v1.Groups": {
        "Join": _FIRST,
        "Heartbeat": _REFUSED,
        "ListGroups": _REFUSED,
        "GetGroup": _REFUSED,
    },
    "shoal.v1.Tokens": {
        "GetTicket": _FIRST,
        "GetLoginLink": _ALWAYS,
        "CreateToken": _ALWAYS,
        "RevokeToken": _ALWAYS,
        "ListTokens": _REFUSED,
    },
    "shoal.v1.ParameterServer": {
        "Attach": _REFUSED,
        "Pull": _REFUSED,
        "Push": _REFUSED,
        "Commit": _REFUSED,
        "ShareNorm": _REFUSED,
        "Assign": _ALWAYS,
        "CreateShards": _ALWAYS,
        "DropShards": _ALWAYS,
        "AdmitWorkers": _ALWAYS,
        "FenceWorkers": _ALWAYS,
        "ReleaseWorkers": _ALWAYS,
        "SetRate": _ALWAYS,
        "AddBackup": _FIRST,
        "DropBackup": _ALWAYS,
        "DropCopy": _ALWAYS,
        "SplitGroup": _ALWAYS,
        "Promote": _ALWAYS,
        "HoldCommits": _ALWAYS,
        "ResumeCommits": _ALWAYS,
        "Save": _ALWAYS,
        "CollectFiles": _ALWAYS,
        "Restore": _ALWAYS,
    },
    "grpc.health.v1.Health": {"Check": _REFUSED},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _REFUSED},
    # Requests to the page. Its actions on jobs count as the RPCs that do the same.
    "page": {"login": _ALWAYS, "logout": _ALWAYS, "request": _REFUSED},
}

AUDITED: Mapping[str, Audited] = {
    f"{service}/{method}": audited for service, methods in _BY_SERVICE.items() for method, audited in methods.items()
}
# The statuses of calls that are refused because of their caller's identity.
REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})


__all__ = ["AUDITED", "REFUSALS", "Audited"]

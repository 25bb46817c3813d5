"""The error catalogue: all errors that Shoal raises, each with its code and gRPC status. It does not use grpc.

A role raises one of these. `shoal._rpc` converts it to a gRPC status with an `ErrorDetail`, and the caller's side
converts it back to the same class. Users catch `shoal.errors.StaleGeneration`, never `grpc.RpcError`.
"""

from typing import ClassVar


class ShoalError(Exception):
    """The root of all errors that Shoal raises.

    Attributes:
        code: identifier of the class on the wire; it never changes and is never reused.
        status: name of the gRPC status that carries the error.
        message: what is wrong, where, and what to do.
        details: values that the message mentions, as strings by name.

    Args:
        message: the attribute.
        details: values of any type, converted to strings.
    """

    code: ClassVar[str] = "INTERNAL"
    status: ClassVar[str] = "INTERNAL"
    catalogue: ClassVar[dict[str, type["ShoalError"]]] = {}

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = {key: str(value) for key, value in details.items()}

    def __init_subclass__(cls, *, code: str, status: str) -> None:
        cls.code, cls.status = code, status
        if code in ShoalError.catalogue:
            raise TypeError(f"error code {code} is taken by {ShoalError.catalogue[code].__name__}")
        ShoalError.catalogue[code] = cls


class InternalError(ShoalError, code="INTERNAL", status="INTERNAL"):
    """A defect of Shoal. The log of the process that answered has the traceback."""


# Requests that are invalid in every state of the cluster: a retry does not help.


class BadRequest(ShoalError, code="BAD_REQUEST", status="INVALID_ARGUMENT"):
    """A field of a request, or an argument, is missing or out of range."""


class BadChunk(ShoalError, code="BAD_CHUNK", status="INVALID_ARGUMENT"):
    """Chunks are malformed, overlap, exceed their slab, leave too many gaps or do not cover it. They are discarded."""


class BadFrame(ShoalError, code="BAD_FRAME", status="INVALID_ARGUMENT"):
    """A lane received bytes that are not a frame, or an unexpected frame. The lane was closed."""


class LimitExceeded(BadRequest, code="LIMIT_EXCEEDED", status="RESOURCE_EXHAUSTED"):
    """A request or a job exceeds a limit, which the message names. A retry does not help.

    docs/reference/limits/index.md lists the limits, and the options that change them.
    """


class MessageTooLarge(ShoalError, code="MESSAGE_TOO_LARGE", status="RESOURCE_EXHAUSTED"):
    """A message exceeds the size limit of the receiver. Arrays are not affected: they travel as chunks."""


class InvalidVariable(ShoalError, code="INVALID_VARIABLE", status="INVALID_ARGUMENT"):
    """A variable's name, shape, dtype, initializer, partitioner or aggregation is invalid."""


class InvalidGradient(ShoalError, code="INVALID_GRADIENT", status="INVALID_ARGUMENT"):
    """The name, shape or dtype of a gradient does not match the job's variables."""


class NonFiniteGradient(ShoalError, code="NON_FINITE_GRADIENT", status="INVALID_ARGUMENT"):
    """A gradient contains NaN or Inf. Every shard rejected it; the variables are unchanged."""


class InvalidJob(ShoalError, code="INVALID_JOB", status="INVALID_ARGUMENT"):
    """A job's specification is invalid, or contradicts itself or the program."""


class InvalidOptimizer(ShoalError, code="INVALID_OPTIMIZER", status="INVALID_ARGUMENT"):
    """An optimizer, schedule or hyperparameter is unknown or out of range."""


class InvalidLayer(ShoalError, code="INVALID_LAYER", status="INVALID_ARGUMENT"):
    """A layer's settings are out of range, or contradict each other."""


class InvalidShape(ShoalError, code="INVALID_SHAPE", status="INVALID_ARGUMENT"):
    """A layer or a loss received an array of the wrong shape. The message names the layer and both shapes."""


class ProgramError(ShoalError, code="PROGRAM_ERROR", status="FAILED_PRECONDITION"):
    """A job's program cannot be imported, is not a program, or raised an exception."""


class ProgramNotAllowed(ShoalError, code="PROGRAM_NOT_ALLOWED", status="PERMISSION_DENIED"):
    """A worker may not import the program's module; see `--allow-program`. Nothing of the program has run."""


class DeviceUnavailable(ShoalError, code="DEVICE_UNAVAILABLE", status="FAILED_PRECONDITION"):
    """The requested device does not exist, or cannot be used."""


class InvalidData(ShoalError, code="INVALID_DATA", status="FAILED_PRECONDITION"):
    """A data set's files or arrays are missing, damaged, or of another kind than declared."""


# Requests that do not match the state of the cluster.


class UnknownJob(ShoalError, code="UNKNOWN_JOB", status="NOT_FOUND"):
    """There is no job of that name, or it was dropped."""


class UnknownGroup(ShoalError, code="UNKNOWN_GROUP", status="NOT_FOUND"):
    """There is no elastic group of that name, or all of its processes have ended."""


class UnknownShard(ShoalError, code="UNKNOWN_SHARD", status="NOT_FOUND"):
    """The server does not hold that shard."""


class JobExists(ShoalError, code="JOB_EXISTS", status="ALREADY_EXISTS"):
    """A job of that name is running. Choose another name, or cancel the job."""


class JobRunning(ShoalError, code="JOB_RUNNING", status="FAILED_PRECONDITION"):
    """The job has not ended yet, and the request needs an ended one."""


class JobEnded(ShoalError, code="JOB_ENDED", status="FAILED_PRECONDITION"):
    """The job has ended, and the request needs a live one."""


class JobFailed(ShoalError, code="JOB_FAILED", status="FAILED_PRECONDITION"):
    """The job failed. The message has the reason."""


class NotPlaced(ShoalError, code="NOT_PLACED", status="FAILED_PRECONDITION"):
    """The job's variables are not on servers: before it runs, while it restarts, or after they were freed.

    The message has the job's state.
    """


class NotStaged(ShoalError, code="NOT_STAGED", status="FAILED_PRECONDITION"):
    """The server has not staged the push that a commit names. Push again."""


class RankLost(ShoalError, code="RANK_LOST", status="UNAVAILABLE"):
    """A rank of a group has ended, did not join, or cannot be reached. All ranks of the group fail, and name it.

    An elastic group can go on without it. Otherwise start all ranks again, from a checkpoint.
    """


class RanksDisagree(ShoalError, code="RANKS_DISAGREE", status="FAILED_PRECONDITION"):
    """Ranks of a group make different collective calls, have the same number, or expect different sizes or generations.

    Replicas of a strategy that make different calls raise it, too.
    """


class WrongContext(ShoalError, code="WRONG_CONTEXT", status="FAILED_PRECONDITION"):
    """A call of a distribution strategy is made in the wrong context, or with an object of another strategy."""


class UnknownMember(ShoalError, code="UNKNOWN_MEMBER", status="NOT_FOUND"):
    """The coordinator remembers no member of that id."""


class ServerNeeded(ShoalError, code="SERVER_NEEDED", status="FAILED_PRECONDITION"):
    """A server was not drained: jobs would lose their values, or have no other server. The message names them."""


class DuplicateMember(ShoalError, code="DUPLICATE_MEMBER", status="ALREADY_EXISTS"):
    """Another live process has this member id. Give each process its own id."""


class WrongVersion(ShoalError, code="WRONG_VERSION", status="FAILED_PRECONDITION"):
    """A member and its coordinator run different versions of Shoal. All roles of a cluster need the same version."""


class StaleGeneration(ShoalError, code="STALE_GENERATION", status="ABORTED"):
    """The request carries the generation of another placement. Fetch the placement again."""


class Moved(ShoalError, code="MOVED", status="ABORTED"):
    """Another server is the primary of these shards, or the caller is no longer their primary. Fetch the placement."""


class UnequalKernels(ShoalError, code="UNEQUAL_KERNELS", status="FAILED_PRECONDITION"):
    """Two servers compile their kernels for different processors, so one cannot have a copy of the other's shards."""


class Fenced(ShoalError, code="FENCED", status="ABORTED"):
    """This incarnation was declared lost or was replaced. The cluster refuses all its further calls."""


class SecretRefused(Fenced, code="SECRET_REFUSED", status="PERMISSION_DENIED"):
    """The secret of a registration is not genuine, or is not that of the incarnation that the request names.

    The coordinator may have another store than when it gave the secret. A member then registers again.
    """


# The errors of a server that no longer has the shards of a placement: it was restarted, or the shards were dropped or
# placed again. For a running job, the caller reports the shards as lost, and the job restarts from a checkpoint.
SHARDS_LOST = (UnknownJob, UnknownShard, StaleGeneration)


# Checkpoints.


class UnknownCheckpoint(ShoalError, code="UNKNOWN_CHECKPOINT", status="NOT_FOUND"):
    """There is no such checkpoint, or no complete one."""


class CorruptCheckpoint(ShoalError, code="CORRUPT_CHECKPOINT", status="DATA_LOSS"):
    """A checkpoint's files differ from what was written. None of its values were used."""


class IncompatibleCheckpoint(ShoalError, code="INCOMPATIBLE_CHECKPOINT", status="FAILED_PRECONDITION"):
    """A checkpoint is complete, but has other variables or was written by a later version of Shoal."""


class StorageFailed(ShoalError, code="STORAGE_FAILED", status="UNAVAILABLE"):
    """The checkpoint storage cannot be read or written: it is full, forbidden, or failing, or the cluster has none."""


# Authorization.


class Unauthenticated(ShoalError, code="UNAUTHENTICATED", status="UNAUTHENTICATED"):
    """The caller has no valid credentials. Give it a token of this cluster, or open a new login link of the page.

    docs/how-to/security.md says where a caller finds its token.
    """


class Forbidden(ShoalError, code="FORBIDDEN", status="PERMISSION_DENIED"):
    """The caller's access role, or the owner of the job or member, does not allow the request.

    The message says who may make it. The page also refuses requests that come from pages of other sites.
    """


# Connections, limits and local resources.


class Unreachable(ShoalError, code="UNREACHABLE", status="UNAVAILABLE"):
    """No process answers at the address."""


class DeadlineExceeded(ShoalError, code="DEADLINE_EXCEEDED", status="DEADLINE_EXCEEDED"):
    """The reply did not arrive in time."""


class Cancelled(ShoalError, code="CANCELLED", status="CANCELLED"):
    """The caller cancelled the call, or the job was cancelled."""


class Overloaded(ShoalError, code="OVERLOADED", status="RESOURCE_EXHAUSTED"):
    """A limit was reached, such as the number of watchers or of staged bytes. The message says when to try again."""


class StartFailed(ShoalError, code="START_FAILED", status="FAILED_PRECONDITION"):
    """A role of a local cluster, or an installed plugin, could not start. The message has the reason."""


class NotConfigured(ShoalError, code="NOT_CONFIGURED", status="FAILED_PRECONDITION"):
    """The cluster was started without what the request needs. The message names the coordinator's option for it."""


class PortInUse(ShoalError, code="PORT_IN_USE", status="UNAVAILABLE"):
    """Another process uses the port. Choose another port, or 0 for any free one."""


class StoreLocked(ShoalError, code="STORE_LOCKED", status="FAILED_PRECONDITION"):
    """Another coordinator has the store open. The message names it."""


class StoreUnreadable(ShoalError, code="STORE_UNREADABLE", status="FAILED_PRECONDITION"):
    """The coordinator's store is damaged, was written by a newer version, or is not a store."""


class StoreFailed(ShoalError, code="STORE_FAILED", status="UNAVAILABLE"):
    """The coordinator's store cannot be opened or written: the disk is full or failing, or access is denied."""


__all__ = [
    "BadChunk",
    "BadFrame",
    "BadRequest",
    "Cancelled",
    "CorruptCheckpoint",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "DuplicateMember",
    "Fenced",
    "Forbidden",
    "IncompatibleCheckpoint",
    "InternalError",
    "InvalidData",
    "InvalidGradient",
    "InvalidJob",
    "InvalidLayer",
    "InvalidOptimizer",
    "InvalidShape",
    "InvalidVariable",
    "JobEnded",
    "JobExists",
    "JobFailed",
    "JobRunning",
    "LimitExceeded",
    "MessageTooLarge",
    "Moved",
    "NonFiniteGradient",
    "NotConfigured",
    "NotPlaced",
    "NotStaged",
    "Overloaded",
    "PortInUse",
    "ProgramError",
    "ProgramNotAllowed",
    "RankLost",
    "RanksDisagree",
    "SecretRefused",
    "ServerNeeded",
    "ShoalError",
    "StaleGeneration",
    "StartFailed",
    "StorageFailed",
    "StoreFailed",
    "StoreLocked",
    "StoreUnreadable",
    "Unauthenticated",
    "UnequalKernels",
    "UnknownCheckpoint",
    "UnknownGroup",
    "UnknownJob",
    "UnknownMember",
    "UnknownShard",
    "Unreachable",
    "WrongContext",
    "WrongVersion",
]

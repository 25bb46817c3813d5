"""The error catalogue: every way in which Shoal says no, with its code and gRPC status, and nothing of grpc itself.

A role raises one of these; `shoal._rpc` turns it into a status with a machine-readable `ErrorDetail` and, at the
other end, back into the same class. Users catch `shoal.errors.StaleEpoch`, never `grpc.RpcError`.
"""

from typing import ClassVar


class ShoalError(Exception):
    """The root of all errors that Shoal raises.

    Attributes:
        code: names the class on the wire; never reused, never changed.
        status: the gRPC status that carries it.
        message: what was wrong, where, and what to do.
        details: the values behind the message, as strings.
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
    """A defect of Shoal: the far end's log has the traceback."""


# Requests that are wrong in themselves: sending them again does not help.


class BadRequest(ShoalError, code="BAD_REQUEST", status="INVALID_ARGUMENT"):
    """A request that no client of ours sends: a field is missing or out of its range."""


class BadChunk(ShoalError, code="BAD_CHUNK", status="INVALID_ARGUMENT"):
    """Chunks that are out of order, overlap, overrun their arena or end too soon. Nothing was kept."""


class BadFrame(ShoalError, code="BAD_FRAME", status="INVALID_ARGUMENT"):
    """What came over a lane is no frame, or none that belongs there. The lane was closed."""


class MessageTooLarge(ShoalError, code="MESSAGE_TOO_LARGE", status="RESOURCE_EXHAUSTED"):
    """One message is over the limit of the receiver. Arrays of any size travel as chunks."""


class InvalidVariable(ShoalError, code="INVALID_VARIABLE", status="INVALID_ARGUMENT"):
    """A variable's name, shape, dtype, initializer, partitioner or aggregation makes no sense."""


class InvalidGradient(ShoalError, code="INVALID_GRADIENT", status="INVALID_ARGUMENT"):
    """A gradient has a name, shape or dtype that the job's variables do not."""


class NonFiniteGradient(ShoalError, code="NON_FINITE_GRADIENT", status="INVALID_ARGUMENT"):
    """A gradient holds NaN or Inf. It was rejected on every shard; the variables are as they were."""


class InvalidJob(ShoalError, code="INVALID_JOB", status="INVALID_ARGUMENT"):
    """A job's specification contradicts itself or the program."""


class InvalidOptimizer(ShoalError, code="INVALID_OPTIMIZER", status="INVALID_ARGUMENT"):
    """An optimizer, schedule or hyperparameter is unknown or out of range."""


class InvalidLayer(ShoalError, code="INVALID_LAYER", status="INVALID_ARGUMENT"):
    """A layer's settings are out of their range, or contradict each other."""


class InvalidShape(ShoalError, code="INVALID_SHAPE", status="INVALID_ARGUMENT"):
    """A layer or a loss was fed an array of a shape that it does not take; the message names it and both shapes."""


class ProgramError(ShoalError, code="PROGRAM_ERROR", status="FAILED_PRECONDITION"):
    """A job's program will not import, is not a program, or raised."""


class DeviceUnavailable(ShoalError, code="DEVICE_UNAVAILABLE", status="FAILED_PRECONDITION"):
    """The device that was asked for is not there, or cannot be used."""


class InvalidData(ShoalError, code="INVALID_DATA", status="FAILED_PRECONDITION"):
    """A data set's files or arrays are missing, damaged, or not what they are said to be."""


# Requests that do not fit the state of the cluster.


class UnknownJob(ShoalError, code="UNKNOWN_JOB", status="NOT_FOUND"):
    """No job of that name, or none any more."""


class UnknownShard(ShoalError, code="UNKNOWN_SHARD", status="NOT_FOUND"):
    """The server does not hold that shard."""


class JobExists(ShoalError, code="JOB_EXISTS", status="ALREADY_EXISTS"):
    """A job of that name is running: choose another name, or cancel it."""


class JobRunning(ShoalError, code="JOB_RUNNING", status="FAILED_PRECONDITION"):
    """The job has to end first."""


class JobFailed(ShoalError, code="JOB_FAILED", status="FAILED_PRECONDITION"):
    """The job ended without success; the message says why."""


class NotPlaced(ShoalError, code="NOT_PLACED", status="FAILED_PRECONDITION"):
    """The job's variables are not on servers yet."""


class NotStaged(ShoalError, code="NOT_STAGED", status="FAILED_PRECONDITION"):
    """A commit of a push that this server has not staged: push again."""


class DuplicateMember(ShoalError, code="DUPLICATE_MEMBER", status="ALREADY_EXISTS"):
    """A live process has this member id: give each process its own."""


class WrongVersion(ShoalError, code="WRONG_VERSION", status="FAILED_PRECONDITION"):
    """A member is of another version of Shoal than its coordinator: a cluster has one."""


class StaleEpoch(ShoalError, code="STALE_EPOCH", status="ABORTED"):
    """The request carries another placement's epoch: fetch the placement again."""


class Fenced(ShoalError, code="FENCED", status="ABORTED"):
    """This incarnation was declared dead or replaced; its calls are refused for ever."""


# What a server answers that does not have the shards that its caller was told it has: it has been started again since,
# or they were dropped or placed anew. Whoever is told so of a running job takes them for lost, and the job goes back.
SHARDS_LOST = (UnknownJob, UnknownShard, StaleEpoch)


# Checkpoints.


class UnknownCheckpoint(ShoalError, code="UNKNOWN_CHECKPOINT", status="NOT_FOUND"):
    """There is no such checkpoint, or none that is whole."""


class CorruptCheckpoint(ShoalError, code="CORRUPT_CHECKPOINT", status="DATA_LOSS"):
    """A checkpoint's files are not those that were written: nothing of it was used."""


class IncompatibleCheckpoint(ShoalError, code="INCOMPATIBLE_CHECKPOINT", status="FAILED_PRECONDITION"):
    """A checkpoint is whole, but not of these variables, or of a later version of Shoal."""


class StorageFailed(ShoalError, code="STORAGE_FAILED", status="UNAVAILABLE"):
    """What checkpoints are written to or read from failed: full, forbidden, or broken."""


# Who may call.


class Unauthenticated(ShoalError, code="UNAUTHENTICATED", status="UNAUTHENTICATED"):
    """The caller cannot show that it may do this."""


class Forbidden(ShoalError, code="FORBIDDEN", status="PERMISSION_DENIED"):
    """Nobody may do this here: it comes from another site's page, or the page is for reading alone."""


# The way there.


class Unreachable(ShoalError, code="UNREACHABLE", status="UNAVAILABLE"):
    """Nobody answers at that address."""


class DeadlineExceeded(ShoalError, code="DEADLINE_EXCEEDED", status="DEADLINE_EXCEEDED"):
    """The answer did not come in time."""


class Cancelled(ShoalError, code="CANCELLED", status="CANCELLED"):
    """The call was given up by its caller, or the job was cancelled."""


class Overloaded(ShoalError, code="OVERLOADED", status="RESOURCE_EXHAUSTED"):
    """A bound was reached (watchers, staged bytes): try again later."""


class StartFailed(ShoalError, code="START_FAILED", status="FAILED_PRECONDITION"):
    """A role of a local cluster, or an installed plugin, could not start; the message says why."""


class PortInUse(ShoalError, code="PORT_IN_USE", status="UNAVAILABLE"):
    """Another process listens there: choose another port, or 0 for any free one."""


class StoreLocked(ShoalError, code="STORE_LOCKED", status="FAILED_PRECONDITION"):
    """Another coordinator has the store open; the message says which."""


class StoreUnreadable(ShoalError, code="STORE_UNREADABLE", status="FAILED_PRECONDITION"):
    """The coordinator's store is damaged, of a newer version, or no store."""


class StoreFailed(ShoalError, code="STORE_FAILED", status="UNAVAILABLE"):
    """The coordinator's store cannot be opened or written: the disk is full or fails, or the folder is not its own."""


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
    "JobExists",
    "JobFailed",
    "JobRunning",
    "MessageTooLarge",
    "NonFiniteGradient",
    "NotPlaced",
    "NotStaged",
    "Overloaded",
    "PortInUse",
    "ProgramError",
    "ShoalError",
    "StaleEpoch",
    "StartFailed",
    "StorageFailed",
    "StoreFailed",
    "StoreLocked",
    "StoreUnreadable",
    "Unauthenticated",
    "UnknownCheckpoint",
    "UnknownJob",
    "UnknownShard",
    "Unreachable",
    "WrongVersion",
]

"""Shoal: a parameter-server cluster for training models in any framework.

Start a cluster with `LocalCluster`, or use `connect` to reach a running one. Then `submit` a `Job`, or open a `session`
for your own training loop. The documentation is in docs/.

The import is cheap: each name is loaded at its first use.
"""

TYPE_CHECKING = False  # as type checkers know it: the module `typing` would take a fifth of the time
if TYPE_CHECKING:
    from shoal import callbacks, consistency, data, errors, events, initializers, optim, partitioners, status
    from shoal._memory.allocator import tune as tune_allocator
    from shoal._session.trees import unflatten
    from shoal.checkpoint_policy import CheckpointPolicy
    from shoal.checkpoints import Checkpoint, Checkpoints
    from shoal.client import Client, JobHandle, connect
    from shoal.consistency import Asynchronous, BoundedStaleness, Synchronous
    from shoal.errors import (
        Cancelled,
        CorruptCheckpoint,
        DeadlineExceeded,
        DeviceUnavailable,
        DuplicateMember,
        Fenced,
        IncompatibleCheckpoint,
        InternalError,
        InvalidData,
        InvalidGradient,
        InvalidJob,
        InvalidLayer,
        InvalidOptimizer,
        InvalidShape,
        InvalidVariable,
        JobEnded,
        JobExists,
        JobFailed,
        JobRunning,
        LimitExceeded,
        MessageTooLarge,
        NonFiniteGradient,
        NotConfigured,
        NotPlaced,
        Overloaded,
        PortInUse,
        ProgramError,
        ProgramNotAllowed,
        RankLost,
        RanksDisagree,
        ServerNeeded,
        ShoalError,
        StaleGeneration,
        StartFailed,
        StorageFailed,
        UnknownCheckpoint,
        UnknownGroup,
        UnknownJob,
        UnknownMember,
        Unreachable,
        WrongContext,
        WrongVersion,
    )
    from shoal.evaluation import evaluate
    from shoal.evaluation_policy import EvaluationPolicy
    from shoal.job import Job
    from shoal.local_cluster import LocalCluster
    from shoal.program import Dataset, Program, StepOutput
    from shoal.session import PushResult, Session
    from shoal.status import JobState
    from shoal.variables import Variable

    __version__: str

__all__ = [
    "Asynchronous",
    "BoundedStaleness",
    "Cancelled",
    "Checkpoint",
    "CheckpointPolicy",
    "Checkpoints",
    "Client",
    "CorruptCheckpoint",
    "Dataset",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "DuplicateMember",
    "EvaluationPolicy",
    "Fenced",
    "IncompatibleCheckpoint",
    "InternalError",
    "InvalidData",
    "InvalidGradient",
    "InvalidJob",
    "InvalidLayer",
    "InvalidOptimizer",
    "InvalidShape",
    "InvalidVariable",
    "Job",
    "JobEnded",
    "JobExists",
    "JobFailed",
    "JobHandle",
    "JobRunning",
    "JobState",
    "LimitExceeded",
    "LocalCluster",
    "MessageTooLarge",
    "NonFiniteGradient",
    "NotConfigured",
    "NotPlaced",
    "Overloaded",
    "PortInUse",
    "Program",
    "ProgramError",
    "ProgramNotAllowed",
    "PushResult",
    "RankLost",
    "RanksDisagree",
    "ServerNeeded",
    "Session",
    "ShoalError",
    "StaleGeneration",
    "StartFailed",
    "StepOutput",
    "StorageFailed",
    "Synchronous",
    "UnknownCheckpoint",
    "UnknownGroup",
    "UnknownJob",
    "UnknownMember",
    "Unreachable",
    "Variable",
    "WrongContext",
    "WrongVersion",
    "__version__",
    "callbacks",
    "connect",
    "consistency",
    "data",
    "errors",
    "evaluate",
    "events",
    "initializers",
    "optim",
    "partitioners",
    "status",
    "tune_allocator",
    "unflatten",
]

# The modules that define the public names; all other names are errors. Every import of the package runs this module
# first, and a role sets up its allocator before gRPC and NumPy are loaded. So this module loads neither. It imports
# nothing at all, because a command must be able to handle Ctrl-C soon.
_HOMES = {
    "Asynchronous": "consistency",
    "BoundedStaleness": "consistency",
    "Checkpoint": "checkpoints",
    "CheckpointPolicy": "checkpoint_policy",
    "Checkpoints": "checkpoints",
    "Client": "client",
    "Dataset": "program",
    "EvaluationPolicy": "evaluation_policy",
    "Job": "job",
    "JobHandle": "client",
    "JobState": "status",
    "LocalCluster": "local_cluster",
    "Program": "program",
    "PushResult": "session",
    "Session": "session",
    "StepOutput": "program",
    "Synchronous": "consistency",
    "Variable": "variables",
    "connect": "client",
    "evaluate": "evaluation",
    "unflatten": "_session.trees",
}
_ADAPTERS = {"jax", "keras", "torch", "transformers"}  # packages that need a framework
_MODULES = {"callbacks", "data", "errors", "events", "initializers", "optim", "partitioners", *_HOMES.values()}

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> object:
        from importlib import import_module  # noqa: PLC0415 - as the comment above says

        if name in _MODULES or name in _ADAPTERS:
            return import_module(f"shoal.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'shoal' has no attribute {name!r}")
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415 - slow

            value = version("shoal")
        elif name == "tune_allocator":
            value = import_module("shoal._memory.allocator").tune
        else:
            value = getattr(import_module(f"shoal.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


del TYPE_CHECKING  # no public name

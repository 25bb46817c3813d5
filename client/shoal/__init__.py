"""Shoal: a parameter-server cluster for training, for any framework.

Start with `LocalCluster`, or `connect` to a cluster that runs; `submit` a `Job`, or open a `session` for a loop of your
own. How it reads in full: the README.
"""

from importlib.metadata import version as _version

from shoal import consistency, errors, events, initializers, optim, partitioners, status
from shoal.client import Client, JobHandle, connect
from shoal.consistency import Asynchronous, BoundedStaleness, Synchronous
from shoal.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceUnavailable,
    DuplicateMember,
    Fenced,
    InternalError,
    InvalidGradient,
    InvalidJob,
    InvalidOptimizer,
    InvalidVariable,
    JobExists,
    JobFailed,
    JobRunning,
    MessageTooLarge,
    NonFiniteGradient,
    NotPlaced,
    Overloaded,
    PortInUse,
    ProgramError,
    ShoalError,
    StaleEpoch,
    StartFailed,
    UnknownJob,
    Unreachable,
)
from shoal.job import Job
from shoal.local_cluster import LocalCluster
from shoal.program import Dataset, Program, Step
from shoal.session import PushResult, Session
from shoal.status import JobState
from shoal.variables import Variable

__version__ = _version("shoal")

__all__ = [
    "Asynchronous",
    "BoundedStaleness",
    "Cancelled",
    "Client",
    "Dataset",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "DuplicateMember",
    "Fenced",
    "InternalError",
    "InvalidGradient",
    "InvalidJob",
    "InvalidOptimizer",
    "InvalidVariable",
    "Job",
    "JobExists",
    "JobFailed",
    "JobHandle",
    "JobRunning",
    "JobState",
    "LocalCluster",
    "MessageTooLarge",
    "NonFiniteGradient",
    "NotPlaced",
    "Overloaded",
    "PortInUse",
    "Program",
    "ProgramError",
    "PushResult",
    "Session",
    "ShoalError",
    "StaleEpoch",
    "StartFailed",
    "Step",
    "Synchronous",
    "UnknownJob",
    "Unreachable",
    "Variable",
    "__version__",
    "connect",
    "consistency",
    "errors",
    "events",
    "initializers",
    "optim",
    "partitioners",
    "status",
]

"""Messages between the nodes of a simulation, in the shape of those in `protos/shoal/v1`.

What workers and servers send to the coordinator are the events of its state machine, and the two questions here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal._wire import Cursor
from shoal.consistency import Consistency
from shoal_server.shards.machine.events import AnswerCut
from shoal_server.shards.machine.worker_progress import WorkerProgress


class PushName(NamedTuple):
    """A worker's push. It adds 1 to each value, and carries these samples of an epoch."""

    generation: int
    worker: str
    incarnation: int
    step: int
    epoch: int
    start: int
    stop: int


class Stamp(NamedTuple):
    """What each call of a worker to a server carries."""

    job: str
    worker: str
    incarnation: int
    step: int
    generation: int


@dataclass(frozen=True)
class Placements:
    """A worker asks the coordinator for the placement of a job."""

    job: str


@dataclass(frozen=True)
class States:
    """A worker asks the coordinator for the state of a job."""

    job: str


@dataclass(frozen=True)
class CreateShards:
    """Creates a job's shards."""

    job: str
    generation: int
    consistency: Consistency
    norms: tuple[str, ...] = ()
    shards: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class DropShards:
    """Frees a job's shards."""

    job: str


@dataclass(frozen=True)
class Restore:
    """Fills a job's shards from a checkpoint."""

    job: str
    generation: int
    number: int
    version: int
    step: int


@dataclass(frozen=True)
class AdmitWorkers:
    """Admits workers: name, incarnation and rank. The reply has their steps, or errors."""

    job: str
    workers: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class FenceWorkers:
    """Fences workers: name and incarnation. The reply has their committed steps."""

    job: str
    workers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ReleaseWorkers:
    """Releases workers: name, incarnation and committed steps."""

    job: str
    workers: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class HoldCommits:
    """The first half of a cut. The reply has the progress of each worker."""

    job: str
    generation: int
    cut: int


@dataclass(frozen=True)
class ResumeCommits:
    """Ends a cut that was not saved, or the pause after one."""

    job: str
    cut: int


@dataclass(frozen=True)
class Save:
    """The second half of a cut. The reply has a `Saved` for each lock group."""

    job: str
    generation: int
    cut: int
    number: int
    progress: Mapping[str, WorkerProgress]
    pause_s: float


# What a lock group answers to a `Save`: its answer, and the pushes that its values are the sum of.
Saved = tuple[AnswerCut, frozenset[PushName]]


@dataclass(frozen=True)
class CollectFiles:
    """Asks for the file of a checkpoint, if it is written."""

    job: str
    number: int


@dataclass(frozen=True)
class AddBackup:
    """Makes the primary of a lock group, or its backup, copy it to another server.

    The reply says whether the copy is complete.
    """

    job: str
    generation: int
    group: int
    term: int
    backup: str
    keeps_term: int = 0
    as_backup: bool = False


@dataclass(frozen=True)
class DropBackup:
    """Makes the primary of a lock group continue alone, or with one backup. Also ends the copy of a backup."""

    job: str
    generation: int
    group: int
    term: int
    keeps_term: int = 0
    as_backup: bool = False


@dataclass(frozen=True)
class SplitGroup:
    """Makes some shards of a lock group a group of their own."""

    job: str
    generation: int
    group: int
    term: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class DropCopy:
    """Frees a copy of an earlier term."""

    job: str
    generation: int
    group: int
    term: int


@dataclass(frozen=True)
class Promote:
    """Makes a backup the primary. It keeps the copy of its own that was begun in `keeps_term`."""

    job: str
    generation: int
    group: int
    term: int
    keeps_term: int = 0


@dataclass(frozen=True)
class ReplicaHello:
    """A primary opens the connection to a backup. `connect` takes the end of the backup, and returns the lane."""

    config: CreateShards
    term: int
    server: str
    incarnation: int
    connect: Callable[[Any], Any]


@dataclass(frozen=True)
class Pull:
    """Asks a lock group for the values, or with `barrier` only for the step. The reply is a `Pulled`."""

    shards: tuple[int, ...]
    stamp: Stamp
    ahead: int = 0
    barrier: bool = False


@dataclass(frozen=True)
class Pulled:
    """The version of the values, and the worker's next step."""

    version: int
    step: int


@dataclass(frozen=True)
class Push:
    """Stages a push, and commits it if `commit` is set. A push without a name brings nothing."""

    shards: tuple[int, ...]
    stamp: Stamp
    weight: float
    version: int
    name: PushName | None
    cursor: Cursor | None
    commit: bool


@dataclass(frozen=True)
class Commit:
    """Commits a staged push."""

    shards: tuple[int, ...]
    stamp: Stamp


@dataclass(frozen=True)
class ShareNorm:
    """Tells another server the squares of a step's mean."""

    job: str
    generation: int
    server: str
    step: int
    squares: tuple[float, ...]

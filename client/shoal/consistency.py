"""Consistency modes: what users choose between. How a shard enforces them is in `shoal_server.shards.consistency`."""

from dataclasses import dataclass
from typing import ClassVar

from shoal import errors
from shoal.v1 import job_pb2

# The wire's widths.
_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1


class Consistency:
    """How the pushes and pulls of a job's workers are ordered. One of the three below."""

    name: ClassVar[str]

    @property
    def overlaps(self) -> bool:
        """Whether a worker's next pull may be answered before its last push has come.

        If so, both may run while it computes; the values that it computes on then lack its own last push. If not, the
        pull would wait for the push, and running them together would gain nothing.
        """
        raise NotImplementedError

    @property
    def needs_every_worker(self) -> bool:
        """Whether no update is applied while any one worker takes no step.

        If so, a worker that holds still keeps the variables as they are, for example until a checkpoint's cut is made.
        """
        return False

    def to_proto(self) -> job_pb2.Consistency:
        """The message that carries this mode."""
        raise NotImplementedError

    def check(self, workers: int) -> None:
        """Raises InvalidJob if this mode makes no sense for a job of `workers` workers."""


@dataclass(frozen=True)
class Synchronous(Consistency):
    """Each step's gradients are averaged, weighted by their samples, and applied once.

    N workers compute what one process computes on the joined batch, and a push counts whole or not at all.

    With backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016) a step closes once
    `workers - backup_workers` have contributed, or all that are left; gradients that come later are dropped. Each shard
    closes its own steps, so a gradient that comes just at the close may count on some shards and be dropped on others:
    a push's outcome "accepted" then means on one shard at least. A worker that has died or finished uses up one of the
    backups.

    Args:
        backup_workers: workers, >= 0 and fewer than the job's.

    Raises:
        InvalidJob: backup_workers is not a whole number from 0 to 2^32 - 1.
    """

    backup_workers: int = 0
    name: ClassVar[str] = "sync"

    def __post_init__(self) -> None:
        _check_count(self, "backup_workers", self.backup_workers, _UINT32)

    @property
    def overlaps(self) -> bool:
        return False  # the next values come only once the step has closed

    @property
    def needs_every_worker(self) -> bool:
        return not self.backup_workers  # backup workers stand in for one that holds still

    def check(self, workers: int) -> None:
        if self.backup_workers >= workers:
            raise errors.InvalidJob(
                f"Synchronous: {self.backup_workers} backup workers of {workers} workers leave none to wait for; "
                f"use at most {workers - 1}",
                backup_workers=self.backup_workers,
                workers=workers,
            )

    def to_proto(self) -> job_pb2.Consistency:
        return job_pb2.Consistency(synchronous=job_pb2.Synchronous(backup_workers=self.backup_workers))

    def __str__(self) -> str:
        return f"sync:{self.backup_workers}" if self.backup_workers else "sync"


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """Every gradient is applied when it comes, and no pull waits.

    Args:
        scale_by_staleness: divide the learning rate by the gradient's staleness where that is above 1
            (Zhang et al., "Staleness-aware Async-SGD", IJCAI 2016).

    Raises:
        InvalidJob: scale_by_staleness is neither True nor False.
    """

    scale_by_staleness: bool = False
    name: ClassVar[str] = "async"

    def __post_init__(self) -> None:
        value: object = self.scale_by_staleness
        if not isinstance(value, bool):
            raise errors.InvalidJob(
                f"Asynchronous: scale_by_staleness is {value!r}; it must be True or False", scale_by_staleness=value
            )

    @property
    def overlaps(self) -> bool:
        return True

    def to_proto(self) -> job_pb2.Consistency:
        mode = job_pb2.Asynchronous(scale_by_staleness=self.scale_by_staleness)
        return job_pb2.Consistency(asynchronous=mode)

    def __str__(self) -> str:
        return "async:scaled" if self.scale_by_staleness else "async"


@dataclass(frozen=True)
class BoundedStaleness(Consistency):
    """Stale synchronous parallel (Ho et al., NIPS 2013).

    A pull by a worker that has finished c steps is answered once every live worker has finished c - bound or more,
    so no worker runs more than `bound` steps ahead of the slowest. bound=0 makes every worker wait for all at each
    step; unlike `Synchronous`, gradients are still applied one by one, in order of arrival.

    Args:
        bound: steps, >= 0.

    Raises:
        InvalidJob: bound is not a whole number from 0 to 2^64 - 1.
    """

    bound: int
    name: ClassVar[str] = "ssp"

    def __post_init__(self) -> None:
        _check_count(self, "bound", self.bound, _UINT64)

    @property
    def overlaps(self) -> bool:
        return self.bound >= 1  # with 0 nobody gets values before all have finished the step

    def to_proto(self) -> job_pb2.Consistency:
        return job_pb2.Consistency(bounded_staleness=job_pb2.BoundedStaleness(bound=self.bound))

    def __str__(self) -> str:
        return f"ssp:{self.bound}"


def _check_count(mode: Consistency, name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise errors.InvalidJob(
            f"{type(mode).__name__}: {name} is {value!r}; it must be a whole number from 0 to {most}", **{name: value}
        )


def from_proto(message: job_pb2.Consistency) -> Consistency:
    """The mode that a message carries.

    Raises:
        InvalidJob: the message names no mode.
    """
    match message.WhichOneof("mode"):
        case "synchronous":
            return Synchronous(message.synchronous.backup_workers)
        case "asynchronous":
            return Asynchronous(message.asynchronous.scale_by_staleness)
        case "bounded_staleness":
            return BoundedStaleness(message.bounded_staleness.bound)
        case _:
            raise errors.InvalidJob("the job names no consistency mode; choose sync, async or ssp:BOUND")


def parse(text: str) -> Consistency:
    """Reads a mode as people write it: sync, sync:BACKUP_WORKERS, async, async:scaled, ssp:BOUND.

    Raises:
        InvalidJob: the text is none of these.
    """
    name, _, argument = text.partition(":")
    try:
        match name, argument:
            case "sync", _:
                return Synchronous(int(argument or 0))
            case "async", "":
                return Asynchronous()
            case "async", "scaled":
                return Asynchronous(scale_by_staleness=True)
            case "ssp", _:
                return BoundedStaleness(int(argument))
    except ValueError:
        pass
    raise errors.InvalidJob(
        f"consistency {text!r} is not one of sync, sync:BACKUP_WORKERS, async, async:scaled, ssp:BOUND",
        consistency=text,
    )


__all__ = ["Asynchronous", "BoundedStaleness", "Consistency", "Synchronous", "from_proto", "parse"]

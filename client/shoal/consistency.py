"""Consistency modes that a job can have. `shoal_server.shards.machine.consistency` enforces them in a shard."""

from dataclasses import dataclass
from typing import ClassVar

from shoal import errors
from shoal._job.checks import MOST_STEPS, STEPS, UINT32
from shoal.v1 import job_pb2


class Consistency:
    """The rule that orders the pulls and pushes of a job's workers: the base class of the three modes."""

    name: ClassVar[str]

    @property
    def overlaps(self) -> bool:
        """Whether a server may answer a worker's next pull before the worker's last push has arrived.

        If so, both can run while the worker computes. The pulled values then do not include the worker's last push.
        Otherwise the pull waits for the push, and an overlap gains nothing.
        """
        raise NotImplementedError

    @property
    def lead(self) -> int | None:
        """The largest number of steps by which a worker may be ahead of the slowest one; None means any number."""
        return None

    @property
    def needs_every_worker(self) -> bool:
        """Whether servers apply updates only while all workers take steps.

        If so, the variables stay unchanged while one worker pauses, for example until a checkpoint's cut is taken.
        """
        return False

    @property
    def joins_gradients(self) -> bool:
        """Whether an update applies the mean of the gradients of several workers, instead of one worker's gradient."""
        return False

    @property
    def servers_agree(self) -> bool:
        """Whether all servers of a job apply the gradients of the same pushes in an update."""
        return True

    def to_proto(self) -> job_pb2.Consistency:
        """Returns the message that carries this mode."""
        raise NotImplementedError

    def check(self, workers: int) -> None:
        """Raises InvalidJob if this mode does not allow a job of `workers` workers."""


@dataclass(frozen=True)
class Synchronous(Consistency):
    """Synchronous training: servers average the gradients of a step, weighted by samples, and apply them once.

    N workers compute the same result as one process with the combined batch. Without backup workers, a push counts on
    all servers or on none.

    With backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016), a step closes when
    `workers - backup_workers` workers have contributed, or when all remaining workers have. Later gradients are
    dropped. Each server closes its own steps, so a gradient may count on some servers and be dropped on others. The
    outcome "accepted" of a push then means that at least one server accepted it. A lost or finished worker counts as
    one of the backup workers.

    Args:
        backup_workers: number of workers whose gradients a step does not need, from 0 to one less than the job's
            workers.

    Raises:
        InvalidJob: backup_workers is not a whole number from 0 to 2^32 - 1.
    """

    backup_workers: int = 0
    name: ClassVar[str] = "sync"

    def __post_init__(self) -> None:
        _check_count(self, "backup_workers", self.backup_workers, UINT32)

    @property
    def overlaps(self) -> bool:
        return False  # a pull waits until the step has closed

    @property
    def lead(self) -> int:
        return 0

    @property
    def needs_every_worker(self) -> bool:
        return not self.backup_workers

    @property
    def joins_gradients(self) -> bool:
        return True

    @property
    def servers_agree(self) -> bool:
        return not self.backup_workers

    def check(self, workers: int) -> None:
        if self.backup_workers >= workers:
            raise errors.InvalidJob(
                f"Synchronous: {self.backup_workers} backup workers are too many for {workers} workers; "
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
    """Asynchronous training: servers apply each gradient when it arrives, and no pull waits.

    Args:
        scale_by_staleness: whether to divide the learning rate by the gradient's staleness if that is above 1 (Zhang et
            al., "Staleness-aware Async-SGD", IJCAI 2016).

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

    A pull by a worker that has finished c steps is answered once every live worker has finished c - bound or more. So
    no worker runs more than `bound` steps ahead of the slowest. With bound=0 every worker waits for all others at each
    step. In contrast to `Synchronous`, servers apply the gradients of a step one by one, in order of arrival.

    Args:
        bound: largest distance from the slowest worker, in steps, 0 or more.

    Raises:
        InvalidJob: bound is not a whole number from 0 to 2^53 - 1.
    """

    bound: int
    name: ClassVar[str] = "ssp"

    def __post_init__(self) -> None:
        _check_count(self, "bound", self.bound, MOST_STEPS, STEPS)

    @property
    def overlaps(self) -> bool:
        return self.bound >= 1  # with 0, a pull waits until all workers have finished the step

    @property
    def lead(self) -> int:
        return self.bound

    def to_proto(self) -> job_pb2.Consistency:
        return job_pb2.Consistency(bounded_staleness=job_pb2.BoundedStaleness(bound=self.bound))

    def __str__(self) -> str:
        return f"ssp:{self.bound}"


def _check_count(mode: Consistency, name: str, value: object, most: int, words: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        words = words or f"a whole number from 0 to {most}"
        raise errors.InvalidJob(f"{type(mode).__name__}: {name} is {value!r}; it must be {words}", **{name: value})


def from_proto(message: job_pb2.Consistency) -> Consistency:
    """Returns the mode that a message carries.

    Raises:
        InvalidJob: the message has no mode, or its value is out of range.
    """
    match message.WhichOneof("mode"):
        case "synchronous":
            return Synchronous(message.synchronous.backup_workers)
        case "asynchronous":
            return Asynchronous(message.asynchronous.scale_by_staleness)
        case "bounded_staleness":
            return BoundedStaleness(message.bounded_staleness.bound)
        case _:
            raise errors.InvalidJob("the job has no consistency mode; choose sync, async or ssp:BOUND")


def parse(text: str) -> Consistency:
    """Parses a mode: sync, sync:BACKUP_WORKERS, async, async:scaled, or ssp:BOUND.

    Raises:
        InvalidJob: the text has another form, or a value is out of range.
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

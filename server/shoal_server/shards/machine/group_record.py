"""Group record: what the state machine of a lock group keeps, what may be asked about it, and copies of it.

`shoal_server.shards.machine.state` changes it. It is pure.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

from shoal import errors
from shoal.optim import Schedule
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import events
from shoal_server.shards.machine.clocks import Clocks, WorkerClock, check_step
from shoal_server.shards.machine.mode import Contribution, Mode
from shoal_server.shards.machine.norm_exchange import NormExchange
from shoal_server.shards.machine.permits import Permits
from shoal_server.shards.machine.pulls import Pulls
from shoal_server.shards.machine.replica_inputs import NumberOf, PayloadOf, decode_staged, encode_staged
from shoal_server.shards.machine.worker_progress import WorkerProgress
from shoal_server.shards.machine.worker_records import Answers, AppliedPushes, Fences


@dataclass
class GroupRecord:
    """The record of one lock group.

    Args:
        name: name for messages: that of the job.
        mode: enforces the job's consistency mode.
        on_admission: called with each pull and push that is let through, by tests.
        peers: member ids of the other servers of the job, if an update needs the norm of its whole gradient.
    """

    name: str
    mode: Mode
    version: int = 0  # updates applied; never falls
    clocks: Clocks = field(default_factory=Clocks)  # admitted workers; fenced ones stay until released
    furthest: int = 0  # largest number of steps that any worker has finished; no clock exceeds it
    on_admission: Callable[[events.Admission], object] | None = None
    peers: Collection[str] = ()
    _used: bool = False  # whether a worker has pulled or pushed
    _staged: dict[str, Contribution] = field(default_factory=dict)  # at most one per worker, not yet committed
    applied: AppliedPushes = field(default_factory=AppliedPushes)  # of admitted workers
    _cut_waits: bool = False  # whether a cut waits for a norm
    _learning_rate: Schedule | None = None  # for later updates; None means that of the optimizer
    permits: Permits = field(init=False)
    _pulls: Pulls = field(init=False)
    _fences: Fences = field(init=False)
    _answers: Answers = field(init=False)  # to admitted workers only
    _norms: NormExchange = field(init=False)

    def __post_init__(self) -> None:
        self.permits = Permits(self.mode, self.clocks)
        self._pulls = Pulls(self.name, self.mode, self.clocks, partial(self._record, "pull"))
        self._fences, self._answers = Fences(self.name), Answers(self.name)
        self._norms = NormExchange(self.name, self.peers)

    def answer_to(self, worker: str, incarnation: int, step: int) -> events.AnswerPush | None:
        """Returns the answer to a push with this stamp if it was committed; otherwise None.

        Args:
            worker: name of the worker.
            incarnation: its incarnation.
            step: step of the push.

        Raises:
            Fenced: the worker or its incarnation is not admitted.
            BadRequest: the step is out of range, or older than the last answered one.
        """
        clock = self._admitted(worker, incarnation)
        check_step(self.name, step, self.furthest)
        return self._answers.to(worker, step, clock.steps)

    @property
    def begun(self) -> bool:
        """Whether workers are admitted, or the values are no longer the initial ones."""
        return bool(self.clocks or self._used or self.version or self.furthest)

    def progress(self) -> dict[str, WorkerProgress]:
        """Returns each admitted worker's progress on this shard."""
        return {
            worker: WorkerProgress(clock.incarnation, self._answers.committed(worker), clock.steps)
            for worker, clock in self.clocks.items()
        }

    def abandon_all(self) -> list[Any]:
        """Removes all waiting pulls and pushes, and returns their tickets."""
        return [*self._pulls.clear(), *self.permits.clear()]

    @property
    def waiting(self) -> int:
        """Number of waiting pulls."""
        return len(self._pulls)

    @property
    def staged(self) -> int:
        """Number of pushes that are not committed yet."""
        return len(self._staged)

    @property
    def is_copyable(self) -> bool:
        """Whether `write_to` may be called: the open step has no contribution. Then no cut or reader waits for it."""
        return self.mode.is_empty

    def write_to(self, message: pb.GroupState, gradient_of: NumberOf, ticket_of: NumberOf) -> None:
        """Writes the state into an empty message, for a copy. The state must be copyable.

        The copy lacks the waiting pulls, and otherwise does the same as this one at each event.

        Args:
            message: the message.
            gradient_of: returns the number of a payload.
            ticket_of: returns the number of a push's ticket, from 1.
        """
        assert self.is_copyable, "the open step has contributions"
        message.version, message.furthest, message.used = self.version, self.furthest, self._used
        self.applied.count()
        for worker, clock in self.clocks.items():
            entry = message.workers.add(
                worker=worker, incarnation=clock.incarnation, rank=clock.rank, steps=clock.steps
            )
            self._answers.write_to(entry)
            self.applied.write_to(entry)
        self._fences.write_to(message)
        for push in self._staged.values():
            staged = encode_staged(push, gradient_of)
            staged.rank = push.rank
            message.staged.append(staged)
        if self._learning_rate:
            message.learning_rate.CopyFrom(self._learning_rate.to_proto())
        self.permits.write_to(message.permits, ticket_of)
        self.mode.write_to(message)
        self._norms.write_to(message, self.mode.next_step(0))

    @classmethod
    def restored(
        cls,
        message: pb.GroupState,
        name: str,
        mode: Mode,
        payload_of: PayloadOf,
        *,
        peers: Collection[str] = (),
        on_admission: Callable[[events.Admission], object] | None = None,
    ) -> Self:
        """Returns a copy of the state machine that has written a message.

        The caller sets `permits.limits` to that of the other one.

        Args:
            message: the message.
            name: as for the class.
            mode: a new one, of the same consistency mode.
            payload_of: returns the payload with a number.
            peers: as for the class.
            on_admission: as for the class.

        Raises:
            BadRequest: a worker is listed twice, or a staged push is not that of an admitted worker, or an
                answer is not known.
            InvalidOptimizer: the learning rate is not valid.
        """
        self = cls(name, mode, message.version, furthest=message.furthest, on_admission=on_admission, peers=peers)
        self._used = message.used
        for entry in message.workers:
            if entry.worker in self.clocks:
                raise errors.BadRequest(f"{name}: a copy lists the worker {entry.worker} twice")
            self.clocks.admit(entry.worker, WorkerClock(entry.incarnation, entry.rank, entry.steps))
            self._answers.restore(entry)
            self.applied.restore(entry)
        self._fences.restore(message)
        for staged in message.staged:
            self._staged[staged.worker] = self._restored_push(staged, payload_of)
        if message.HasField("learning_rate"):
            self._learning_rate = Schedule.from_proto(message.learning_rate)
        mode.restore(message)
        self.permits.restore(message.permits)
        self._norms.restore(message, mode.next_step(0))
        return self

    def _restored_push(self, message: pb.ReplicaContribution, payload_of: PayloadOf) -> Contribution:
        clock = self.clocks.get(message.worker)
        if not clock or clock.place != (message.rank, message.incarnation):
            raise errors.BadRequest(
                f"{self.name}: a copy has a push of {message.worker} as incarnation {message.incarnation} and rank "
                f"{message.rank}, but no such worker"
            )
        return contribution_of(decode_staged(message, payload_of), message.rank)

    def forget_callers(self) -> None:
        """Forgets all calls that wait, because they waited at another server: of a backup that becomes the primary.

        Pulls and pushes that wait are dropped, and their callers ask again. Granted permits stay: a repeated push takes
        its permit over, and a worker that does not come back loses it when it is released.
        """
        self._pulls.clear()
        self._cut_waits = False
        self.permits.forget_callers()

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. Tests call it after every event."""
        assert all(clock.steps <= self.furthest for clock in self.clocks.values())
        assert self._staged.keys() <= self.clocks.keys()
        assert self._answers.workers <= self.clocks.keys()
        assert len({clock.rank for clock in self.clocks.values()}) == len(self.clocks)
        self._pulls.validate()
        assert self.applied.workers == self.clocks.keys()
        assert self.mode.awaits_norm or not self._cut_waits
        self.permits.validate()

    def _admitted(self, worker: str, incarnation: int) -> WorkerClock:
        clock = self.clocks.get(worker)
        if not clock or clock.incarnation != incarnation or self._fences.has(worker, incarnation):
            raise self._fences.error(worker, incarnation)
        return clock

    def _record(self, kind: Literal["pull", "push"], workers: Iterable[str], step: int) -> None:
        self._used = True
        if self.on_admission:
            slowest = self.clocks.slowest(step)
            for worker in workers:
                self.on_admission(events.Admission(kind, worker, step, slowest, self.version))


def contribution_of(push: events.PushStaged, rank: int) -> Contribution:
    """Returns the contribution of a staged push of the worker with this rank."""
    return Contribution(
        rank,
        push.incarnation,
        push.step,
        push.weight,
        push.version,
        push.payload,
        push.worker,
        push.cursor,
        push.squares,
        push.learning_rate,
    )


__all__ = ["GroupRecord"]

"""Records of a lock group about its workers, apart from their clocks.

They are the incarnations that are fenced, the answers to the last pushes, and the pushes that were applied.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from itertools import repeat
from typing import Literal

from shoal import errors
from shoal._wire import Cursor, PushCounts
from shoal._wire.limits import MAX_STEP
from shoal.v1 import parameter_server_pb2 as server_pb
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine.events import AnsweredPush, AnswerPush
from shoal_server.shards.machine.mode import Contribution

_PushOutcome = Literal["staged", "accepted", "dropped_late", "skipped"]
_OUTCOMES: Mapping[_PushOutcome, server_pb.PushOutcome.ValueType] = {
    "staged": server_pb.STAGED,
    "accepted": server_pb.ACCEPTED,
    "dropped_late": server_pb.DROPPED_LATE,
    "skipped": server_pb.SKIPPED,
}
_NAMES = {outcome: name for name, outcome in _OUTCOMES.items()}

# Fenced workers that a group remembers, so that a delayed admission is refused.
FENCED_WORKERS = 4_096


class Fences:
    """The newest fenced incarnation of each worker. Only the FENCED_WORKERS workers that were fenced last are kept.

    Args:
        name: name of the group, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._newest: dict[str, int] = {}

    def add(self, worker: str, incarnation: int) -> None:
        """Fences this and all earlier incarnations of a worker."""
        self._newest[worker] = max(incarnation, self._newest.pop(worker, 0))
        if len(self._newest) > FENCED_WORKERS:
            del self._newest[next(iter(self._newest))]

    def has(self, worker: str, incarnation: int) -> bool:
        """Returns whether an incarnation is fenced."""
        return incarnation <= self._newest.get(worker, 0)

    def write_to(self, message: pb.GroupState) -> None:
        """Writes the fences into a message, for a copy."""
        for worker, incarnation in self._newest.items():
            message.fences.add(worker=worker, incarnation=incarnation)

    def restore(self, message: pb.GroupState) -> None:
        """Restores the fences that another object has written."""
        self._newest = {fence.worker: fence.incarnation for fence in message.fences}

    def error(self, worker: str, incarnation: int) -> errors.Fenced:
        """Returns the error for an incarnation that is not admitted."""
        return errors.Fenced(
            f"{self._name}: incarnation {incarnation} of {worker} is not admitted: it was declared lost, replaced, or "
            "has left; join the job again",
            worker=worker,
            incarnation=incarnation,
        )


class Answers:
    """The answer to each worker's last committed push.

    Args:
        name: name of the group, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[str, AnsweredPush] = {}

    def remember(self, worker: str, step: int, answer: AnswerPush) -> None:
        """Remembers the answer to a worker's push.

        Args:
            worker: name of the worker.
            step: step of the push.
            answer: its answer.
        """
        self._last[worker] = AnsweredPush(step, answer)

    def forget(self, worker: str) -> None:
        """Forgets a worker."""
        self._last.pop(worker, None)

    def committed(self, worker: str) -> int:
        """Returns 1 + the last step that a worker committed; 0 if none."""
        answered = self._last.get(worker)
        return answered.step + 1 if answered else 0

    def to(self, worker: str, step: int, finished: int) -> AnswerPush | None:
        """Returns the answer to a repeated push; None if the push was not committed.

        Args:
            worker: name of the worker.
            step: step of the push.
            finished: number of steps that the worker has finished.

        Raises:
            BadRequest: the step is older than the last answered one.
        """
        answered = self._last.get(worker)
        if answered and answered.step == step:
            return replace(answered.answer, repeated=True)
        if step < finished:
            raise errors.BadRequest(
                f"{self._name}: {worker} pushes step {step}, but has finished {finished} steps; only the last push "
                "may be repeated",
                step=step,
                expected=finished,
            )
        return None

    def write_to(self, message: pb.WorkerState) -> None:
        """Writes the answer to the worker that a message names, for a copy."""
        answered = self._last.get(message.worker)
        if answered:
            it = answered.answer
            message.answer.CopyFrom(
                pb.AnsweredPushState(
                    step=answered.step,
                    outcome=_OUTCOMES[it.outcome],
                    staleness=it.staleness,
                    next_step=it.step,
                    version=it.version,
                )
            )

    def restore(self, message: pb.WorkerState) -> None:
        """Restores the answer to a worker that another object has written.

        Raises:
            BadRequest: the answer has no outcome that this server knows.
        """
        if not message.HasField("answer"):
            return
        it = message.answer
        outcome = _NAMES.get(it.outcome)
        if not outcome:
            raise errors.BadRequest(
                f"{self._name}: a copy has the unknown outcome {it.outcome} of a push of {message.worker}; run one "
                "version of Shoal on all servers"
            )
        self.remember(message.worker, it.step, AnswerPush(outcome, it.staleness, it.next_step, it.version))

    @property
    def workers(self) -> set[str]:
        """Names of the workers."""
        return set(self._last)


class AppliedPushes:
    """The applied pushes of each admitted worker: their counts, and its position in its data.

    One update can apply the pushes of a thousand workers, under the group's lock. So it only queues them here. Each
    later push takes two of them from the queue and counts them; a cut does so with all.
    """

    def __init__(self) -> None:
        self._counts: dict[str, PushCounts] = {}
        self._cursors: dict[str, Cursor] = {}
        self._queued: deque[tuple[Contribution, bool]] = deque()  # with whether an update has applied it

    def admit(self, worker: str, incarnation: int) -> None:
        """Adds a worker without pushes."""
        self._counts[worker] = PushCounts(incarnation)

    def release(self, worker: str) -> None:
        """Forgets a worker."""
        self._counts.pop(worker, None)
        self._cursors.pop(worker, None)

    @property
    def queued(self) -> int:
        """Number of contributions that are not counted yet."""
        return len(self._queued)

    def applied(self, contributions: Iterable[Contribution]) -> None:
        """Queues contributions that an update has applied. Those of workers that have left have no effect."""
        self._queued += zip(contributions, repeat(True))

    def passed(self, contribution: Contribution) -> None:
        """Queues a contribution that was not applied, but whose samples count as used."""
        self._queued.append((contribution, False))

    def count(self, most: int | None = None) -> None:
        """Counts queued contributions, oldest first.

        Args:
            most: number of contributions to count; None means all.
        """
        for _ in range(len(self._queued) if most is None else min(most, len(self._queued))):
            self._count(*self._queued.popleft())

    def _count(self, contribution: Contribution, applied: bool) -> None:
        worker = contribution.worker
        counts = self._counts.get(worker)
        if not counts or counts.incarnation != contribution.incarnation:
            return
        if contribution.cursor:
            self._cursors[worker] = contribution.cursor
        if applied:
            samples = counts.samples + round(min(contribution.weight, MAX_STEP))
            self._counts[worker] = PushCounts(counts.incarnation, counts.pushes + 1, min(samples, MAX_STEP - 1))

    def write_to(self, message: pb.WorkerState) -> None:
        """Writes the pushes of the worker that a message names, for a copy. No contribution may be queued."""
        assert not self._queued, "count them first"
        counts, cursor = self._counts[message.worker], self._cursors.get(message.worker)
        message.pushes, message.samples = counts.pushes, counts.samples
        if cursor:
            message.cursor.CopyFrom(cursor.to_proto())

    def restore(self, message: pb.WorkerState) -> None:
        """Restores the pushes of a worker that another object has written."""
        self._counts[message.worker] = PushCounts(message.incarnation, message.pushes, message.samples)
        if message.HasField("cursor"):
            self._cursors[message.worker] = Cursor.from_proto(message.cursor)

    @property
    def counts(self) -> dict[str, PushCounts]:
        """A copy of the counts, by worker."""
        self.count()
        return dict(self._counts)

    @property
    def cursors(self) -> dict[str, Cursor]:
        """A copy of the positions, by worker, in the order of admission; without those that have none."""
        self.count()
        return {worker: self._cursors[worker] for worker in self._counts if worker in self._cursors}

    @property
    def workers(self) -> Set[str]:
        """Names of the workers."""
        return self._counts.keys()


__all__ = ["Answers", "AppliedPushes", "Fences"]

"""Invariants of a run: the nodes tell the checker what they do, and it raises `Violation` when that must not be.

What a state machine thinks of itself is checked by its own `validate`, after each of its events. The checker knows
nothing of the machines: it compares what workers were told with what servers have applied.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.consistency import BoundedStaleness, Synchronous
from shoal.v1 import state_pb2
from shoal_server.shards.machine.events import Admission
from shoal_server.shards.machine.mode import Apply, Contribution
from shoal_server.shards.machine.worker_progress import WorkerProgress
from simulation.messages import PushName, Stamp
from simulation.plan import Plan


class Violation(Exception):
    """An invariant is broken.

    Attributes:
        rule: name of the invariant.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class Applied(Protocol):
    """A lock group, as the checker sees it.

    Attributes:
        server: name of the server.
        number: names the lock group in its job.
        follows: whether it is a backup.
        awaits_decision: whether its values may have updates that nobody was told of, because its backup may lack them.
        generation: generation of the placement.
        pushes: the pushes that its values are the sum of.
        value: the sum: each push adds 1.
        held: accepted pushes that are not applied yet.
        fenced: by worker, the newest incarnation that may not push any more.
        released: by worker and incarnation, its committed steps when it was released.
        version: updates applied.
    """

    server: str
    number: int
    follows: bool
    generation: int
    pushes: set[PushName]
    value: int
    held: set[PushName]
    fenced: dict[str, int]
    released: dict[tuple[str, int], int]
    version: int

    @property
    def awaits_decision(self) -> bool: ...


@dataclass
class Checker:
    """The invariants of one run.

    Attributes:
        plan: the run.
        workers_lost: whether a worker was lost, left or fenced, so that ranges may have been trained on twice.
        acknowledged: number of acknowledged pushes.
        undone: number of those that a restart from a checkpoint has undone.
    """

    plan: Plan
    workers_lost: bool = False
    acknowledged: int = 0
    undone: int = 0
    _generation: int = 0  # the newest one
    # By generation, the primaries that still live, by number; of several, the one that was promoted last.
    _groups: dict[int, dict[int, Applied]] = field(default_factory=dict)
    _acked: dict[int, dict[PushName, None]] = field(default_factory=dict)  # by generation
    _steps: dict[tuple[int, int], frozenset[PushName]] = field(default_factory=dict)  # of synchronous steps
    _bases: dict[int, frozenset[PushName]] = field(default_factory=dict)  # by generation: what it began with
    _seen: dict[tuple[str, int, int], int] = field(default_factory=dict)  # version by worker, generation and group

    # What servers do.

    def created(self, group: Applied) -> None:
        """A server has created a lock group."""
        if not group.follows:
            self._groups.setdefault(group.generation, {})[group.number] = group

    def promoted(self, group: Applied) -> None:
        """A backup has become the primary. It has all that workers were told."""
        self._groups.setdefault(group.generation, {})[group.number] = group
        for name in self._acked.get(group.generation, ()):
            self._counts(group, name)

    def closed(self, group: Applied) -> None:
        """A lock group is gone, with its values."""
        groups = self._groups.get(group.generation, {})
        if groups.get(group.number) is group:
            del groups[group.number]

    def serves(self, group: Applied) -> bool:
        """Returns whether a lock group is the newest primary of its shards."""
        return self._groups.get(group.generation, {}).get(group.number) is group

    def restored(self, group: Applied) -> None:
        """A lock group was filled from a checkpoint: each group of a generation from the same one."""
        base = self._bases.setdefault(group.generation, frozenset(group.pushes))
        if base != group.pushes:
            raise Violation("one_base", f"the servers of generation {group.generation} have different values")

    def applied(self, group: Applied, apply: Apply) -> None:
        """A lock group applies an update."""
        names = [self._name(part) for part in apply.contributions]
        for name in names:
            if name in group.pushes:
                raise Violation("applied_once", f"{group.server} applies {name} again")
            if name.generation != group.generation:
                raise Violation("generation", f"{group.server} applies {name} at generation {group.generation}")
            last = group.released.get((name.worker, name.incarnation))
            if last is not None and name.step >= last:
                raise Violation("fenced", f"{group.server} applies {name}, released after {last} steps")
        if isinstance(self.plan.consistency, Synchronous):
            self._synchronous(group, names)
        group.pushes.update(names)
        group.held.difference_update(names)
        group.value += len(names)
        if group.value != len(group.pushes):
            raise Violation("applied_once", f"{group.server}: the value is {group.value}, of {len(group.pushes)}")

    def _synchronous(self, group: Applied, names: list[PushName]) -> None:
        steps = {name.step for name in names}
        workers = {(name.worker, name.incarnation) for name in names}
        if len(steps) != 1 or len(workers) != len(names):
            raise Violation("sum_of_workers", f"{group.server} sums up {names}")
        step = steps.pop()
        if missing := {name for name in group.held if name.step <= step} - set(names):
            raise Violation("acknowledged", f"{group.server} closes step {step} without {missing}")
        # With backup workers, servers may leave out different ones. What a primary has done and its backup lacks may be
        # done otherwise by the next primary, so it counts when the backup has done it.
        if self.plan.consistency == Synchronous() and not group.awaits_decision:
            key, found = (group.generation, step), frozenset(names)
            if self._steps.setdefault(key, found) != found:
                raise Violation("sum_of_workers", f"step {key[1]}: {group.server} sums up others than another server")

    def version_is(self, group: Applied, version: int) -> None:
        """A lock group has handled an event."""
        if version < group.version:
            raise Violation("versions_rise", f"{group.server} falls from {group.version} to {version}")
        group.version = version

    def admitted(self, group: Applied, admission: Admission) -> None:
        """A lock group lets a pull or a push through."""
        mode = self.plan.consistency
        bound = mode.bound if isinstance(mode, BoundedStaleness) and admission.kind == "pull" else None
        if bound is not None and admission.step - admission.slowest > bound:
            raise Violation("bound", f"{group.server}: {admission}")

    def committed(self, group: Applied, stamp: Stamp) -> None:
        """A lock group commits a push of a worker, for the first time."""
        if stamp.generation != group.generation:
            raise Violation("generation", f"{group.server} commits {stamp} at generation {group.generation}")
        if stamp.incarnation <= group.fenced.get(stamp.worker, 0):
            raise Violation("fenced", f"{group.server} commits {stamp} after it was fenced")

    def answered(self, group: Applied, stamp: Stamp) -> None:
        """A lock group answers a pull."""
        if stamp.generation != group.generation:
            raise Violation("generation", f"{group.server} answers {stamp} at generation {group.generation}")

    def begins(self, generation: int, reachable: Iterable[Applied]) -> None:
        """The coordinator has made a generation: no server that it can reach serves an earlier one."""
        for group in reachable:
            if group.generation < generation and not group.follows:
                raise Violation("one_generation", f"{group.server} serves {group.generation} beside {generation}")

    # What workers are told.

    def pulled(self, worker: str, stamp: Stamp, group: int, version: int) -> None:
        """A worker has got values of a version of a lock group."""
        key = worker, stamp.generation, group
        if version < self._seen.get(key, 0):
            raise Violation("versions_rise", f"{worker} sees group {group} fall from {self._seen[key]} to {version}")
        self._seen[key] = version

    def told_accepted(self, name: PushName) -> None:
        """All servers have answered a worker that its push counts."""
        self.acknowledged += 1
        if name.generation < self._generation:  # the answer was late: a restart has undone the push
            self.undone += 1
            return
        self._acked.setdefault(name.generation, {})[name] = None
        for group in self._groups.get(name.generation, {}).values():
            self._counts(group, name)

    def _counts(self, group: Applied, name: PushName) -> None:
        if name not in group.pushes and name not in group.held:
            raise Violation("acknowledged", f"{group.server} has lost {name}, which was acknowledged")

    # What the coordinator does.

    def cut(self, generation: int, files: Sequence[frozenset[PushName]], data: Any) -> None:
        """A checkpoint was cut: its files, and its ledger.

        Args:
            generation: of the job.
            files: of each lock group, the pushes in its file.
            data: the ledger, a `LedgerRecord`, or None.
        """
        if self._dropping:
            return
        if any(pushes != files[0] for pushes in files):
            raise Violation("consistent_cut", f"the files of a cut differ: {[len(it) for it in files]}")
        if data is not None:
            self._covered(files[0], data, "a cut")

    def published(self, number: int, files: Sequence[frozenset[PushName]]) -> None:
        """A checkpoint is complete, with these files."""
        if not self._dropping and any(pushes != files[0] for pushes in files):
            raise Violation("consistent_cut", f"the files of checkpoint {number} are of different cuts")

    def _covered(self, pushes: frozenset[PushName], data: state_pb2.LedgerRecord, what: str) -> None:
        """Checks that the ledger counts no sample as done that no push has brought."""
        trained = Counter((name.epoch, sample) for name in pushes for sample in range(name.start, name.stop))
        following = (data.next.epoch, data.next.start)
        left = {(part.epoch, sample) for part in data.requeued for sample in range(part.start, part.stop)}
        for epoch in range(data.epochs):
            for sample in range(data.samples):
                done = (epoch, sample) < following and (epoch, sample) not in left
                times = trained[epoch, sample]
                if done and not times:
                    raise Violation("samples", f"{what}: sample {sample} of epoch {epoch} is done, but was not trained")
                if times != done and not self.workers_lost:
                    raise Violation("samples", f"{what}: sample {sample} of epoch {epoch} was trained {times} times")

    def restarts(self, generation: int, base: frozenset[PushName]) -> None:
        """The coordinator continues with a new generation, from these pushes: all later ones are undone."""
        self._generation = max(self._generation, generation)
        undone = [name for acked in self._acked.values() for name in acked if name not in base]
        self.undone += len(undone)
        kept = {name for acked in self._acked.values() for name in acked if name in base}
        self._acked = {}
        for name in kept:
            self._acked.setdefault(name.generation, {})[name] = None

    def succeeded(self, generation: int, finished: Any) -> None:
        """The job has succeeded.

        Args:
            generation: its generation.
            finished: the ledger.
        """
        groups = [*self._groups.get(generation, {}).values()]
        for group in groups:
            for acked in self._acked.values():
                for name in acked:
                    if name not in group.pushes and not (self._dropping and name in group.held):
                        raise Violation("acknowledged", f"{group.server} lacks {name} at the end")
        if self._dropping or not groups:
            return
        if any(group.pushes != groups[0].pushes for group in groups):
            raise Violation("same_at_the_end", "the servers have applied different pushes")
        self._covered(frozenset(groups[0].pushes), finished, "the end")

    @property
    def _dropping(self) -> bool:
        mode = self.plan.consistency
        return isinstance(mode, Synchronous) and mode.backup_workers > 0

    @staticmethod
    def _name(part: Contribution) -> PushName:
        name = part.payload
        assert isinstance(name, PushName)
        return name


def joined(progress: Iterable[Mapping[str, WorkerProgress]]) -> dict[str, WorkerProgress]:
    """Returns the largest progress of each worker on any server."""
    most: dict[str, WorkerProgress] = {}
    for each in progress:
        for worker, it in each.items():
            most[worker] = most[worker].joined(it) if worker in most else it
    return most


__all__ = ["Applied", "Checker", "Violation", "joined"]

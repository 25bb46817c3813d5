"""Consistency modes of a shard: pure bookkeeping over worker clocks, without values, locks or threads.

A mode answers two questions: whether a worker may pull at a step, and which pushes are applied now.
`shoal_server.shards.machine.state` asks them. Users choose a mode with `shoal.consistency`.
"""

import heapq
from collections.abc import Collection

from shoal import consistency
from shoal._wire.limits import PERMIT_FREE_BYTES
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine.clocks import Clocks, WorkerClock
from shoal_server.shards.machine.mode import NO_LIMIT, Apply, Contribution, Fold, Mode, PermitLimits, PushDecision

# Permits of a step: in a small group one for each worker, else three, so that gradients can be received while one is
# folded. There are more of them if all take fewer bytes than this.
_SMALL_GROUP, _PERMITS, FREE_BYTES = 6, 3, 128 << 20


class AsynchronousMode(Mode):
    """Applies each push when it is committed; no pull waits."""

    def __init__(self, *, scale_by_staleness: bool) -> None:
        self._scale_by_staleness = scale_by_staleness

    def limit(self, clocks: Clocks) -> int:
        del clocks
        return NO_LIMIT

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        if contribution.payload is None:
            return PushDecision(accepted=True)
        scale = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        return PushDecision(accepted=True, applies=[Apply((contribution,), scale, squares=contribution.squares)])

    def permit_limits(self, nbytes: int) -> None:
        del nbytes  # a commit applies its gradient at once, so there are only those that are being sent

    def next_step(self, steps: int) -> int:
        return steps

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        # A newcomer joins at the slowest worker's step: behind it, other workers of a bounded mode would have to wait.
        return clocks.slowest(furthest)


class BoundedStalenessMode(AsynchronousMode):
    """Asynchronous, but a pull waits until the slowest worker is within `bound` steps (Ho et al., NIPS 2013)."""

    def __init__(self, bound: int) -> None:
        super().__init__(scale_by_staleness=False)
        self._bound = bound

    def limit(self, clocks: Clocks) -> int:
        return clocks.slowest(NO_LIMIT) + self._bound


class SynchronousMode(Mode):
    """Collects the contributions to each step and applies their mean when the step closes.

    A worker owes the open step until the worker has finished this step. The step closes when no admitted worker owes
    it. It also closes when it has a contribution and the number of admitted workers that owe it is at most the number
    of backups left. A worker that was lost or has finished uses up one backup. So a step takes
    the contributions of all workers except the `backup_workers` slowest ones. If only fewer workers are left, it takes
    all their contributions. Contributions to a closed step are dropped.

    A step that is about to close can be sealed first: it takes no more contributions, and closes after `folds_done`. If
    the step needs the norm of its mean on all servers, it is always sealed, and closes after `norm_known`.

    Contributions are added in order of rank. A contribution can be folded, that is, added to the running sum before the
    step closes. This happens as soon as no worker of an earlier place owes the step. If a worker joins at a place that
    the sum has passed, the worker begins with the next step.

    With backup workers, no gradient can be folded while the gradient of the first worker may still arrive. If memory is
    short, the step is therefore *decided* as soon as enough workers have announced a gradient. The other workers then
    take no part in the step.

    Args:
        backup_workers: number of workers that a step may leave out.
        needs_norm: whether a step needs the norm of its mean on all servers.
    """

    def __init__(self, backup_workers: int, *, needs_norm: bool = False) -> None:
        self._backup_workers, self._needs_norm = backup_workers, needs_norm
        self._most_admitted = 0  # most workers that were admitted at the same time
        self._open_step = 0
        # Contributions to the open step: those that are folded, in order, and the others by place.
        self._folded: list[Contribution] = []
        self._held: dict[tuple[int, int], Contribution] = {}
        self._order: list[tuple[int, int]] = []  # heap of the keys of _held
        self._sealed = False  # whether the open step takes no more contributions; it then has two or more
        self._complete = False  # whether it is sealed, all are in its sum, and its norm is known if it needs one
        self._measured = False  # whether `folds_done` has asked for the squares of the open step
        self._squares: float | None = None  # of the open step's mean on all servers, once known
        # Names of workers that take no part in the open step, by place: they joined too late, or the step is decided.
        self._outside: dict[tuple[int, int], str] = {}
        self._told: set[tuple[int, int]] = set()  # those of _outside that stay there until the step closes
        self._reserved = (-1, -1)  # largest place that got the permit of `first` in the open step

    def limit(self, clocks: Clocks) -> int:
        del clocks
        return self._open_step

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        del staleness
        if not self.wants(contribution.place, contribution.step):
            return PushDecision(accepted=False)
        if contribution.payload is not None:
            if contribution.place not in self._held:
                heapq.heappush(self._order, contribution.place)
            self._held[contribution.place] = contribution
        return PushDecision(accepted=True)

    def settle(self, clocks: Clocks) -> list[Apply]:
        self._most_admitted = max(self._most_admitted, len(clocks))
        applies = []
        while self._closes(clocks):
            if self._held or self._folded:
                if self._needs_norm and not self._sealed:
                    break  # `seal` does it
                rest = (self._held[place] for place in sorted(self._held))
                applies.append(
                    Apply(
                        (*self._folded, *rest),
                        folded=len(self._folded),
                        expected=self._room(clocks),
                        squares=self._squares,
                    )
                )
                self._open(self._open_step + 1)
            else:  # all workers have skipped this step, and perhaps later ones
                self._open(clocks.slowest(self._open_step))
        return applies

    def _open(self, step: int) -> None:
        self._open_step = step
        self._folded, self._held, self._order = [], {}, []
        self._sealed = self._complete = self._measured = False
        self._squares = None
        self._outside, self._told, self._reserved = {}, set(), (-1, -1)

    def fold(self, clocks: Clocks) -> Fold | None:
        if not self._order:
            return None
        owing, count = clocks.first_up_to(self._open_step, self._outside), len(self._folded)
        while self._order and (owing is None or self._order[0] < owing):
            self._folded.append(self._held.pop(heapq.heappop(self._order)))
        found = tuple(self._folded[count:])
        return Fold(found, self._room(clocks)) if found else None

    def seal(self, clocks: Clocks) -> Fold | None:
        if self._needs_norm:
            if self._sealed or not (self._held or self._folded):
                return None
        elif len(self._order) < 2:  # one is added as fast as the update is applied
            return None
        if not self._closes(clocks):
            return None
        self._sealed = True
        rest = tuple(self._held[place] for place in sorted(self._held))
        self._folded += rest
        self._held, self._order = {}, []
        return Fold(rest, self._room(clocks), seals=True)

    def folds_done(self) -> bool:
        if not self._needs_norm:
            self._complete = self._sealed
            return False
        wanted, self._measured = self._sealed and not self._measured, self._sealed
        return wanted

    @property
    def awaits_norm(self) -> bool:
        return self._needs_norm and self._sealed

    def norm_known(self, squares: float) -> None:
        self._squares, self._complete = squares, True

    def permit_limits(self, nbytes: int) -> PermitLimits | None:
        if nbytes <= PERMIT_FREE_BYTES:
            return None
        return PermitLimits(max(_SMALL_GROUP, FREE_BYTES // nbytes), max(_PERMITS, FREE_BYTES // nbytes))

    @property
    def held(self) -> int:
        return len(self._held)

    def wants(self, place: tuple[int, int], step: int) -> bool:
        if place in self._outside and step <= self._open_step:
            self._told.add(place)
            return False
        return step >= self._open_step + self._sealed

    def first(self, clocks: Clocks) -> tuple[int, int] | None:
        return None if self._sealed else clocks.first_up_to(self._open_step, self._outside)

    def reserve(self, place: tuple[int, int]) -> None:
        self._reserved = max(self._reserved, place)

    def decide(self, clocks: Clocks, announced: Collection[tuple[int, int]]) -> bool:
        left = self._backups_left(clocks) if self._backup_workers and not self._sealed else 0
        if not left or not 0 < self._owing(clocks) - len(announced) <= left:
            return False
        silent = {clock.place: worker for worker, clock in clocks.items() if clock.steps <= self._open_step}
        silent = {it: name for it, name in silent.items() if it not in announced and it not in self._outside}
        if not 0 < len(silent) <= left:
            return False
        self._outside |= silent
        return True

    def reopen(self, clocks: Clocks, place: tuple[int, int]) -> None:
        if place == self._reserved:
            self._reserved = (-1, -1)
        if not self._outside:
            return
        passed = self._passed()
        back = [other for other in self._outside if other not in self._told and other > passed]
        for other in back:
            del self._outside[other]
        if back:
            clocks.look_again()

    def _passed(self) -> tuple[int, int]:
        """Returns the largest place that is folded, or whose worker got the permit of `first` and is folded next."""
        return max(self._reserved, self._folded[-1].place) if self._folded else self._reserved

    def _room(self, clocks: Clocks) -> int:
        # Not the number of contributions, which is not known when the first are folded: the bits of tiny sums would
        # depend on the order of arrival.
        return max(1, len(clocks))

    def _closes(self, clocks: Clocks) -> bool:
        if self._sealed:
            return self._complete
        if self._held or self._folded:
            if not self._outside:  # as usual, and checked at each commit
                return clocks.count_up_to(self._open_step) <= max(
                    0, self._backup_workers - self._most_admitted + len(clocks)
                )
            return self._owing(clocks) <= self._backups_left(clocks)
        return bool(clocks) and clocks.count_up_to(self._open_step) == 0

    def _owing(self, clocks: Clocks) -> int:
        """Returns the number of workers that owe the open step and take part in it."""
        return clocks.count_up_to(self._open_step) - sum(
            clock.steps <= self._open_step for clock in self._outsiders(clocks)
        )

    def _backups_left(self, clocks: Clocks) -> int:
        """Returns the number of workers that may still owe the open step when it closes."""
        members = len(clocks) - len(self._outsiders(clocks))
        return max(0, self._backup_workers - (self._most_admitted - members))

    def _outsiders(self, clocks: Clocks) -> list[WorkerClock]:
        """Returns the clocks of the admitted workers that take no part in the open step."""
        if not self._outside:
            return []
        lives = ((clocks.get(worker), incarnation) for (_, incarnation), worker in self._outside.items())
        return [clock for clock, incarnation in lives if clock is not None and clock.incarnation == incarnation]

    def next_step(self, steps: int) -> int:
        return max(steps, self._open_step)

    def resume(self, step: int) -> None:
        self._open_step = step

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        return self._open_step

    def enter(self, worker: str, place: tuple[int, int], clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        if not self._sealed and place >= self._passed():
            return self._open_step
        self._outside[place] = worker
        self._told.add(place)
        return self._open_step + 1

    @property
    def is_empty(self) -> bool:
        return not (self._held or self._folded)  # so it is not sealed

    def write_to(self, message: pb.GroupState) -> None:
        state = message.synchronous
        state.open_step, state.most_admitted = self._open_step, self._most_admitted
        for place, worker in self._outside.items():
            rank, incarnation = place
            state.outside.add(
                place=pb.Place(rank=rank, incarnation=incarnation), worker=worker, told=place in self._told
            )
        if self._reserved >= (0, 0):
            rank, incarnation = self._reserved
            state.reserved.CopyFrom(pb.Place(rank=rank, incarnation=incarnation))

    def restore(self, message: pb.GroupState) -> None:
        state = message.synchronous
        self._open(state.open_step)
        self._most_admitted = state.most_admitted
        for it in state.outside:
            place = it.place.rank, it.place.incarnation
            self._outside[place] = it.worker
            if it.told:
                self._told.add(place)
        if state.HasField("reserved"):
            self._reserved = state.reserved.rank, state.reserved.incarnation


def mode_for(spec: consistency.Consistency, *, shares_norms: bool = False) -> Mode:
    """Returns a new `Mode` for the consistency mode that a job asks for.

    Args:
        spec: the consistency mode.
        shares_norms: whether an update needs the norm of its gradient on several servers.
    """
    match spec:
        case consistency.Synchronous(backup_workers):
            return SynchronousMode(backup_workers, needs_norm=shares_norms)
        case consistency.Asynchronous(scale_by_staleness):
            return AsynchronousMode(scale_by_staleness=scale_by_staleness)
        case consistency.BoundedStaleness(bound):
            return BoundedStalenessMode(bound)
    raise TypeError(f"no consistency mode for {spec!r}")

"""The state machine of one shard: who may pull, what is applied, what a repeated push is answered.

Pure: no values, no locks, no clocks, no I/O. `ShardState.handle(event)` returns effects, which
`shoal_server.shards.shard` performs in order. Gradients pass through as opaque payloads.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal import errors
from shoal._wire import Cursor
from shoal_server.shards.consistency import Apply, Contribution, Mode, WorkerClock, slowest
from shoal_server.shards.events import (
    AnswerAdmission,
    AnswerCut,
    AnswerFence,
    AnswerPull,
    AnswerPush,
    CutRequested,
    Effect,
    Event,
    Overwrite,
    PullAbandoned,
    PullRequested,
    PushCommitted,
    PushStaged,
    RefusePull,
    ValuesAssigned,
    ValuesRestored,
    WorkerAdmitted,
    WorkerFenced,
    WorkerProgress,
    WorkerReleased,
)

# How many admissions a shard remembers: about 2 MB. Whether there are any says that training has begun.
HISTORY = 16_384
# How many pulls may wait at one shard; each waits in memory, not in a thread.
MAX_WAITING_PULLS = 16_384
# Steps and clocks stay below this, so that they and their successors fit every integer on their way.
MAX_STEP = 1 << 53
# A pull may ask for the values of the next step while the worker still computes this one, no earlier.
MAX_AHEAD = 1
# How many fenced workers a shard remembers, so that an admission that was delayed on its way is refused.
FENCED_WORKERS = 4_096


@dataclass(frozen=True, slots=True)
class Admission:
    """A pull or push that was let through, with the clocks at that moment."""

    kind: Literal["pull", "push"]
    worker: str
    step: int
    slowest: int
    version: int


@dataclass(slots=True)
class _Answered:
    """The last push of a worker that was committed: its step, and what it was answered."""

    step: int
    answer: AnswerPush


@dataclass(slots=True)
class _Waiting:
    worker: str
    step: int  # that the values are for


@dataclass
class ShardState:
    """One shard's machine.

    Args:
        name: of the shard, for messages: "job/3".
        mode: enforces the job's consistency.
    """

    name: str
    mode: Mode
    version: int = 0  # updates applied; never falls
    clocks: dict[str, WorkerClock] = field(default_factory=dict)  # the admitted workers, fenced ones until released
    furthest: int = 0  # the most steps any worker ever finished; at least every clock
    history: deque[Admission] = field(default_factory=lambda: deque(maxlen=HISTORY))
    # Worker -> newest incarnation that is refused; the latest FENCED_WORKERS, in order of fencing.
    _fenced: dict[str, int] = field(default_factory=dict)
    _staged: dict[str, Contribution] = field(default_factory=dict)  # at most one a worker, not yet committed
    _answered: dict[str, _Answered] = field(default_factory=dict)  # admitted workers only
    # How far their data had come with what is applied; admitted workers only.
    _cursors: dict[str, Cursor] = field(default_factory=dict)
    _waiting: dict[Any, _Waiting] = field(default_factory=dict)  # in order of arrival

    def handle(self, event: Event) -> list[Effect]:
        """Takes one event and says what to do.

        Raises:
            Fenced: the event comes from a worker, or a life of it, that is not admitted.
            NotStaged: a commit without a staged push.
            BadRequest: a push of a step that is long finished, or that the mode does not let the worker begin; values
                assigned after training has begun.
            Overloaded: too many pulls wait.
        """
        match event:
            case PullRequested():
                return self._pull_requested(event)
            case PullAbandoned():
                return self._pull_abandoned(event)
            case PushStaged():
                return self._push_staged(event)
            case PushCommitted():
                return self._push_committed(event)
            case WorkerAdmitted():
                return self._worker_admitted(event)
            case WorkerFenced():
                return self._worker_fenced(event)
            case WorkerReleased():
                return self._worker_released(event)
            case ValuesAssigned():
                return self._values_assigned()
            case CutRequested():
                return self._cut_made(event)
            case ValuesRestored():
                return self._restored(event)

    def answer_to(self, worker: str, incarnation: int, step: int) -> AnswerPush | None:
        """What a push with this stamp was answered, if it was committed.

        Raises:
            Fenced: the worker, or this life of it, is not admitted.
            BadRequest: an older step than the last one answered.
        """
        clock = self._admitted(worker, incarnation)
        answered = self._answered.get(worker)
        if answered and answered.step == step:
            return replace(answered.answer, repeated=True)
        if step < clock.steps:
            raise errors.BadRequest(
                f"{self.name}: {worker} pushes step {step}, but has finished {clock.steps} steps; only the last push "
                "may be repeated",
                step=step,
                expected=clock.steps,
            )
        return None

    def progress(self) -> dict[str, WorkerProgress]:
        """How far each admitted worker has come here."""
        return {
            worker: WorkerProgress(clock.incarnation, self._committed(worker), clock.steps)
            for worker, clock in self.clocks.items()
        }

    def _committed(self, worker: str) -> int:
        """1 + the number of the last step that a worker committed; 0: none."""
        answered = self._answered.get(worker)
        return answered.step + 1 if answered else 0

    def abandon_all(self) -> list[Any]:
        """Forgets all waiting pulls: their tickets."""
        tickets = list(self._waiting)
        self._waiting.clear()
        return tickets

    @property
    def waiting(self) -> int:
        """Pulls that wait."""
        return len(self._waiting)

    @property
    def staged(self) -> int:
        """Pushes that are not committed yet."""
        return len(self._staged)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken; called after every event in tests."""
        assert all(clock.steps <= self.furthest for clock in self.clocks.values())
        assert self._staged.keys() <= self.clocks.keys()
        assert self._answered.keys() <= self.clocks.keys()
        assert len({clock.rank for clock in self.clocks.values()}) == len(self.clocks)
        for pull in self._waiting.values():
            assert pull.worker in self.clocks
            assert not self.mode.may_pull(pull.step, self.clocks), "a pull waits that could be answered"
        assert self._cursors.keys() <= self.clocks.keys()

    def _worker_admitted(self, event: WorkerAdmitted) -> list[Effect]:
        clock = self.clocks.get(event.worker)
        if clock and clock.incarnation == event.incarnation:  # repeated
            return [AnswerAdmission(clock.steps)]
        if event.incarnation <= self._fenced.get(event.worker, 0):
            raise self._not_admitted(event.worker, event.incarnation)
        if clock:
            raise errors.BadRequest(
                f"{self.name}: {event.worker} is still admitted as incarnation {clock.incarnation}; release that first",
                worker=event.worker,
            )
        entry = self.mode.entry_step(self.clocks, self.furthest)
        self.clocks[event.worker] = WorkerClock(event.incarnation, event.rank, entry)
        return [*self._settle(), AnswerAdmission(entry)]

    def _worker_fenced(self, event: WorkerFenced) -> list[Effect]:
        self._fenced[event.worker] = max(event.incarnation, self._fenced.pop(event.worker, 0))
        if len(self._fenced) > FENCED_WORKERS:
            del self._fenced[next(iter(self._fenced))]
        clock = self.clocks.get(event.worker)
        if not clock or clock.incarnation > event.incarnation:
            return [AnswerFence(0)]
        tickets = [ticket for ticket, pull in self._waiting.items() if pull.worker == event.worker]
        for ticket in tickets:
            del self._waiting[ticket]
        error = self._not_admitted(event.worker, clock.incarnation)
        return [*(RefusePull(ticket, error) for ticket in tickets), AnswerFence(self._committed(event.worker))]

    def _worker_released(self, event: WorkerReleased) -> list[Effect]:
        effects = self._worker_fenced(WorkerFenced(event.worker, event.incarnation))
        clock = self.clocks.get(event.worker)
        if not clock or clock.incarnation > event.incarnation:
            return effects
        staged = self._staged.get(event.worker)
        if staged and staged.step == event.committed_steps - 1:
            # Another shard has committed this push, so it was staged on all: it counts here too. One of an earlier step
            # was refused elsewhere, and given up.
            effects += [effect for effect in self._commit(event.worker, clock) if not isinstance(effect, AnswerPush)]
        self._staged.pop(event.worker, None)
        self._answered.pop(event.worker, None)
        self._cursors.pop(event.worker, None)
        del self.clocks[event.worker]
        return [*effects, *self._settle()]

    def _pull_requested(self, event: PullRequested) -> list[Effect]:
        if not event.worker:
            return [AnswerPull(event.ticket, event.step)]
        if event.ahead > MAX_AHEAD:
            raise errors.BadRequest(f"{self.name}: a pull asks {event.ahead} steps ahead; {MAX_AHEAD} is the most")
        clock = self._admitted(event.worker, event.incarnation)
        effects = self._pass_by(clock, event.step)
        step = event.step + event.ahead
        if self.mode.may_pull(step, self.clocks):
            return [*effects, self._admit_pull(event.ticket, event.worker, step)]
        if len(self._waiting) >= MAX_WAITING_PULLS:
            raise errors.Overloaded(f"{self.name}: {MAX_WAITING_PULLS} pulls wait already; try again later")
        self._waiting[event.ticket] = _Waiting(event.worker, step)
        return effects

    def _pull_abandoned(self, event: PullAbandoned) -> list[Effect]:
        self._waiting.pop(event.ticket, None)
        return []

    def _push_staged(self, event: PushStaged) -> list[Effect]:
        answer = self.answer_to(event.worker, event.incarnation, event.step)
        if answer:
            return [answer]
        if not self.mode.may_pull(event.step, self.clocks):
            raise errors.BadRequest(
                f"{self.name}: {event.worker} pushes step {event.step} before it may begin it; pull first, or wait "
                "at the barrier",
                step=event.step,
            )
        clock = self.clocks[event.worker]
        self._staged[event.worker] = Contribution(
            clock.rank,
            clock.incarnation,
            event.step,
            event.weight,
            event.version,
            event.payload,
            event.worker,
            event.cursor,
        )
        return [AnswerPush("staged", 0, event.step, self.version)]

    def _push_committed(self, event: PushCommitted) -> list[Effect]:
        answer = self.answer_to(event.worker, event.incarnation, event.step)
        if answer:
            return [answer]
        staged = self._staged.get(event.worker)
        if not staged or staged.step != event.step:
            raise errors.NotStaged(
                f"{self.name}: step {event.step} of {event.worker} is not staged here; push it again", step=event.step
            )
        return self._commit(event.worker, self.clocks[event.worker])

    def _values_assigned(self) -> list[Effect]:
        if self.history:  # somebody may have seen the values that this would overwrite
            raise errors.BadRequest(f"{self.name}: values are assigned before training begins, not during")
        return [Overwrite()]

    def _cut_made(self, event: CutRequested) -> list[Effect]:
        effects: list[Effect] = []
        for worker, progress in event.progress.items():
            clock = self.clocks.get(worker)
            if not clock or clock.incarnation != progress.incarnation:
                continue
            if self._committed(worker) < progress.committed:
                last = progress.committed - 1
                staged = self._staged.get(worker)
                if not staged or staged.step != last:  # what brings nothing is committed without a second phase
                    nothing = Contribution(clock.rank, clock.incarnation, last, 0.0, self.version, None, worker)
                    self._staged[worker] = nothing
                effects += [effect for effect in self._commit(worker, clock) if not isinstance(effect, AnswerPush)]
            effects += self._pass_by(clock, progress.finished)
        step = self.mode.entry_step(self.clocks, self.furthest)
        return [*effects, AnswerCut(self.version, step, dict(self._cursors))]

    def _restored(self, event: ValuesRestored) -> list[Effect]:
        # A coordinator that came back may do it again.
        if self.clocks or self.history:
            raise errors.BadRequest(f"{self.name}: a checkpoint is restored before training begins, not during")
        self.version, self.furthest = event.version, event.step
        self.mode.resume(event.step)
        return [Overwrite()]

    def _commit(self, worker: str, clock: WorkerClock) -> list[Effect]:
        staged = self._staged.pop(worker)
        staleness = max(0, self.version - staged.version) if staged.payload is not None else 0
        self._record("push", worker, staged.step)
        taken = self.mode.take(staged, staleness)
        if not taken.accepted:
            self._pass_cursor(staged)  # its data is spent, though nothing came of it
        self._advance(clock, staged.step + 1)
        effects = self._apply(taken.applies)
        effects += self._settle()
        if not taken.accepted:
            self._advance(clock, self.mode.next_step(clock.steps))
        outcome: Literal["accepted", "dropped_late", "skipped"] = (
            "skipped" if staged.payload is None else "accepted" if taken.accepted else "dropped_late"
        )
        answer = AnswerPush(outcome, staleness, self.mode.next_step(staged.step + 1), self.version)
        self._answered[worker] = _Answered(staged.step, answer)
        return [*effects, answer]

    def _pass_by(self, clock: WorkerClock, step: int) -> list[Effect]:
        """A worker that pulls at a step is through with those before it, here too.

        A newcomer begins at the largest entry step of all shards, and who was late goes on at the largest open step:
        both may be ahead of this shard, which must not wait for what will not come.
        """
        if not 0 <= step < MAX_STEP:
            raise errors.BadRequest(f"{self.name}: step {step} is out of range; steps are below {MAX_STEP}", step=step)
        if step <= clock.steps:
            return []
        self._advance(clock, step)
        return self._settle()

    def _advance(self, clock: WorkerClock, steps: int) -> None:
        clock.steps = max(clock.steps, steps)
        self.furthest = max(self.furthest, clock.steps)

    def _settle(self) -> list[Effect]:
        """Applies what the mode lets go and answers the pulls that need wait no longer, in order of arrival."""
        effects = self._apply(self.mode.settle(self.clocks))
        ready = [(ticket, pull) for ticket, pull in self._waiting.items() if self.mode.may_pull(pull.step, self.clocks)]
        for ticket, pull in ready:
            del self._waiting[ticket]
            effects.append(self._admit_pull(ticket, pull.worker, pull.step))
        return effects

    def _apply(self, applies: list[Apply]) -> list[Effect]:
        self.version += len(applies)
        for apply in applies:
            for contribution in apply.contributions:
                self._pass_cursor(contribution)
        return list(applies)

    def _pass_cursor(self, contribution: Contribution) -> None:
        clock = self.clocks.get(contribution.worker)
        if contribution.cursor and clock and clock.incarnation == contribution.incarnation:
            self._cursors[contribution.worker] = contribution.cursor

    def _admit_pull(self, ticket: Any, worker: str, step: int) -> AnswerPull:
        self._record("pull", worker, step)
        return AnswerPull(ticket, self.mode.next_step(step))

    def _record(self, kind: Literal["pull", "push"], worker: str, step: int) -> None:
        self.history.append(Admission(kind, worker, step, slowest(self.clocks, step), self.version))

    def _admitted(self, worker: str, incarnation: int) -> WorkerClock:
        clock = self.clocks.get(worker)
        if not clock or clock.incarnation != incarnation or incarnation <= self._fenced.get(worker, 0):
            raise self._not_admitted(worker, incarnation)
        return clock

    def _not_admitted(self, worker: str, incarnation: int) -> errors.Fenced:
        return errors.Fenced(
            f"{self.name}: incarnation {incarnation} of {worker} is not admitted: it was declared dead, replaced, or "
            "has left; join the job again",
            worker=worker,
            incarnation=incarnation,
        )

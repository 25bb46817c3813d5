"""State machine of a lock group: decides which pulls are answered and which updates are applied.

It also answers repeated requests as it answered the first ones. It is pure: no values, locks, clocks or I/O.
`GroupState.handle(event)` returns effects, which `shoal_server.shards.group` carries out in order. Gradients are
opaque payloads.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from shoal import errors
from shoal.optim import ConstantLR, Schedule
from shoal_server.shards.machine import events
from shoal_server.shards.machine.clocks import WorkerClock, check_step
from shoal_server.shards.machine.events import LockGroupEffect
from shoal_server.shards.machine.group_record import GroupRecord, contribution_of
from shoal_server.shards.machine.mode import Apply, Contribution, Fold


class GroupState(GroupRecord):
    """The state machine of one lock group.

    Args and attributes: see `GroupRecord`.
    """

    def handle(self, event: events.LockGroupEvent) -> list[LockGroupEffect]:
        """Handles one event and returns the effects. An event that raises an error changes nothing.

        Raises:
            Fenced: the event comes from a worker or an incarnation that is not admitted.
            NotStaged: a commit without a staged push.
            BadRequest: a push of a step that was answered long ago, or that the mode does not let the worker begin; or
                values assigned after training has begun.
        """
        effects = self._handle(event)
        if self.permits.waiting:
            effects += self.permits.settle()
            if self.permits.waiting and self.mode.decide(self.clocks, self.permits.announced):
                effects += [*self._settle(), *self.permits.settle()]
        if (self._pulls.readers or self._cut_waits) and not self.mode.awaits_norm:
            effects += self._answer_delayed()
        return effects

    def _handle(self, event: events.LockGroupEvent) -> list[LockGroupEffect]:
        match event:
            case events.PullRequested():
                return self._pull_requested(event)
            case events.PullAbandoned() | events.CallersForgotten():
                return self._callers_gone(event)
            case events.PushOpened() | events.PushWithdrawn() | events.Folded():
                return self._permits_changed(event)
            case events.PushStaged():
                return self._push_staged(event)
            case events.PushCommitted():
                return self._push_committed(event)
            case events.FoldsDone() | events.NormMeasured() | events.NormReceived():
                return self._seal_advanced(event)
            case events.WorkerAdmitted():
                return self._worker_admitted(event)
            case events.WorkerFenced():
                return self._worker_fenced(event)
            case events.WorkerReleased():
                return self._worker_released(event)
            case events.CutRequested():
                return self._cut_requested(event)
            case events.ValuesAssigned() | events.ValuesRestored():
                return self._values_overwritten(event)
            case events.LearningRateSet():
                self._learning_rate = event.learning_rate
        return []  # for a `GroupSplit`, too: the group makes the machines of its parts from this one

    def _worker_admitted(self, event: events.WorkerAdmitted) -> list[LockGroupEffect]:
        clock = self.clocks.get(event.worker)
        if clock and clock.incarnation == event.incarnation:  # repeated
            return [events.AnswerAdmission(clock.steps)]
        if self._fences.has(event.worker, event.incarnation):
            raise self._fences.error(event.worker, event.incarnation)
        if clock:
            raise errors.BadRequest(
                f"{self.name}: {event.worker} is still admitted as incarnation {clock.incarnation}; release it first",
                worker=event.worker,
            )
        entry = self.mode.enter(event.worker, (event.rank, event.incarnation), self.clocks, self.furthest)
        self.furthest = max(self.furthest, entry)
        self.clocks.admit(event.worker, WorkerClock(event.incarnation, event.rank, entry))
        self.applied.admit(event.worker, event.incarnation)
        return [*self._settle(), events.AnswerAdmission(entry)]

    def _worker_fenced(self, event: events.WorkerFenced) -> list[LockGroupEffect]:
        self._fences.add(event.worker, event.incarnation)
        clock = self.clocks.get(event.worker)
        if not clock or clock.incarnation > event.incarnation:
            return [events.AnswerFence(0)]
        error = self._fences.error(event.worker, clock.incarnation)
        refused = [*self.permits.refuse(clock.place, error), *self._pulls.refuse(event.worker, error)]
        return [*refused, events.AnswerFence(self._answers.committed(event.worker))]

    def _worker_released(self, event: events.WorkerReleased) -> list[LockGroupEffect]:
        effects = self._worker_fenced(events.WorkerFenced(event.worker, event.incarnation))
        clock = self.clocks.get(event.worker)
        if not clock or clock.incarnation > event.incarnation:
            return effects
        staged = self._staged.get(event.worker)
        if staged and staged.step == event.committed_steps - 1:
            # Another shard has committed this push, so it was staged on all shards and counts here, too. A staged push
            # of an earlier step was refused elsewhere and is dropped.
            effects += self._commit(event.worker, clock)[:-1]  # without the answer
        self._staged.pop(event.worker, None)
        self._answers.forget(event.worker)
        self.applied.release(event.worker)
        self.clocks.release(event.worker)
        self.permits.drop(clock.place)
        return [*effects, *self._settle()]

    def _pull_requested(self, event: events.PullRequested) -> list[LockGroupEffect]:
        if not event.worker:
            return self._pulls.read(event.ticket, event.step)
        self._pulls.check_ahead(event.ahead)
        clock = self._admitted(event.worker, event.incarnation)
        check_step(self.name, event.step, self.furthest)
        self._used = True
        # No error from here on: the updates of the earlier steps must be applied.
        return [*self._finish_earlier_steps(clock, event.step), *self._pulls.request(event)]

    def _callers_gone(self, event: events.PullAbandoned | events.CallersForgotten) -> list[LockGroupEffect]:
        if isinstance(event, events.PullAbandoned):
            self._pulls.abandon(event.ticket)
        else:
            self.forget_callers()
        return []

    def _permits_changed(
        self, event: events.PushOpened | events.PushWithdrawn | events.Folded
    ) -> list[LockGroupEffect]:
        if isinstance(event, events.Folded):
            self.permits.folded(event.count)
        elif isinstance(event, events.PushWithdrawn):
            self.permits.withdraw(event.ticket, staged=event.worker in self._staged)
        elif answer := self._answer_or_check(event):
            return [answer]
        else:
            return self.permits.open(event.ticket, self.clocks[event.worker].place, event.step)
        return []

    def _answer_or_check(self, event: events.PushOpened | events.PushStaged) -> events.AnswerPush | None:
        """Returns the answer to a push that was committed before; otherwise checks that its step may begin."""
        answer = self.answer_to(event.worker, event.incarnation, event.step)
        if not answer and not self.mode.may_pull(event.step, self.clocks):
            why = f"{self.name}: {event.worker} pushes step {event.step} before it may begin"
            raise errors.BadRequest(f"{why}; pull first, or wait at the barrier", step=event.step)
        return answer

    def _push_staged(self, event: events.PushStaged) -> list[LockGroupEffect]:
        if answer := self._answer_or_check(event):
            return [answer]
        self._staged[event.worker] = contribution_of(event, self.clocks[event.worker].rank)
        return [events.AnswerPush("staged", 0, event.step, self.version)]

    def _push_committed(self, event: events.PushCommitted) -> list[LockGroupEffect]:
        if answer := self.answer_to(event.worker, event.incarnation, event.step):
            return [answer]
        staged = self._staged.get(event.worker)
        if not staged or staged.step != event.step:
            raise errors.NotStaged(
                f"{self.name}: step {event.step} of {event.worker} is not staged here; push it again", step=event.step
            )
        return self._commit(event.worker, self.clocks[event.worker], defers=event.defers)

    def _seal_advanced(
        self, event: events.FoldsDone | events.NormMeasured | events.NormReceived
    ) -> list[LockGroupEffect]:
        """Closes the sealed step if all that it waits for is there."""
        if isinstance(event, events.FoldsDone):
            return [events.MeasureNorm()] if self.mode.folds_done() else self._settle()
        step = self.mode.next_step(0)
        effects = list[LockGroupEffect]()
        if isinstance(event, events.NormMeasured):
            effects.append(events.ShareNorm(step, event.squares))
        if (total := self._norms.add(event, step)) is not None:
            self.mode.norm_known(total)
            effects += self._settle()
        return effects

    def _answer_delayed(self) -> list[LockGroupEffect]:
        """Answers the readers and the cut that have waited for a norm."""
        effects = self._pulls.answer_readers()
        if self._cut_waits:
            step = self.mode.entry_step(self.clocks, self.furthest)
            effects.append(events.AnswerCut(self.version, step, self.applied.cursors, self.applied.counts))
        self._cut_waits = False
        return effects

    def _cut_requested(self, event: events.CutRequested) -> list[LockGroupEffect]:
        for progress in event.progress.values():
            check_step(self.name, max(progress.committed, progress.finished))
        # So that the cut has no sealed step, unless it needs the norms of other servers.
        effects = self._seal_advanced(events.FoldsDone())
        for worker, progress in event.progress.items():
            clock = self.clocks.get(worker)
            if not clock or clock.incarnation != progress.incarnation:
                continue
            if self._answers.committed(worker) < progress.committed:
                last = progress.committed - 1
                staged = self._staged.get(worker)
                if not staged or staged.step != last:  # a push without a payload is committed without a second phase
                    nothing = Contribution(clock.rank, clock.incarnation, last, 0.0, self.version, None, worker)
                    self._staged[worker] = nothing
                effects += self._commit(worker, clock)[:-1]  # without the answer
            effects += self._finish_earlier_steps(clock, progress.finished)
        self._cut_waits = True  # `handle` answers it, now or later
        return effects

    def _values_overwritten(self, event: events.ValuesAssigned | events.ValuesRestored) -> list[LockGroupEffect]:
        restores = isinstance(event, events.ValuesRestored)
        # A worker may have read the values that this would overwrite. A restarted coordinator may repeat a restore.
        if self._used or (restores and self.clocks):
            what = "a checkpoint can only be restored" if restores else "values can only be assigned"
            raise errors.BadRequest(f"{self.name}: training has begun; {what} before that")
        if isinstance(event, events.ValuesAssigned):
            check_step(self.name, event.updates)
            self.version = event.updates
        else:
            check_step(self.name, max(event.version, event.step))
            self.version, self.furthest = event.version, event.step
            self.mode.resume(event.step)
        return [events.Overwrite()]

    def _commit(self, worker: str, clock: WorkerClock, *, defers: bool = False) -> list[LockGroupEffect]:
        staged = self._staged.pop(worker)
        self.applied.count(2)  # so that the queue stays short
        self.permits.committed(staged.place)
        staleness = max(0, self.version - staged.version) if staged.payload is not None else 0
        self._record("push", [worker], staged.step)
        decision = self.mode.take(staged, staleness)
        if not decision.accepted:
            self.applied.passed(staged)  # its samples count as used, although the push was dropped
        self._advance(clock, staged.step + 1)
        effects = self._apply(decision.applies)
        last_fold = self.mode.seal(self.clocks) if defers else None
        effects += self._released(last_fold) if last_fold else self._settle()
        if not decision.accepted:
            self._advance(clock, self.mode.next_step(clock.steps))
        outcome: Literal["accepted", "dropped_late", "skipped"] = (
            "skipped" if staged.payload is None else "accepted" if decision.accepted else "dropped_late"
        )
        version = self.version + (last_fold is not None)  # the step's update follows
        answer = events.AnswerPush(outcome, staleness, self.mode.next_step(staged.step + 1), version)
        self._answers.remember(worker, staged.step, answer)
        return [*effects, answer]

    def _finish_earlier_steps(self, clock: WorkerClock, step: int) -> list[LockGroupEffect]:
        """Marks the steps before `step` as finished: a worker that pulls at a step is done with those before it.

        A newcomer starts at the largest entry step of all shards, and a late worker continues at the largest open step.
        Both can be ahead of this shard, which must not wait for pushes that will not come.
        """
        if step <= clock.steps:
            return []
        self._advance(clock, step)
        return self._settle()

    def _advance(self, clock: WorkerClock, steps: int) -> None:
        self.clocks.advance(clock, steps)
        self.furthest = max(self.furthest, clock.steps)

    def _settle(self) -> list[LockGroupEffect]:
        """Applies and folds what the mode releases, and answers the pulls that may now pass."""
        effects = self._apply(self.mode.settle(self.clocks))
        if fold := (self.mode.seal(self.clocks) if self.peers else None) or self.mode.fold(self.clocks):
            effects += self._released(fold)
        return effects + self._pulls.settle()

    def _released(self, fold: Fold) -> list[LockGroupEffect]:
        self.permits.released(len(fold.contributions))
        return [fold]

    def _apply(self, applies: list[Apply]) -> list[LockGroupEffect]:
        self.version += len(applies)
        if applies:
            self.permits.folded()
        for apply in applies:
            self.applied.applied(apply.contributions)
        return [replace(it, learning_rate=rate) if (rate := self._rate_of(it)) else it for it in applies]

    def _rate_of(self, apply: Apply) -> Schedule | None:
        """Returns the rate of an update: that of the push with the lowest rank that has one, or the rate of the job."""
        given = next((it.learning_rate for it in apply.contributions if it.learning_rate is not None), None)
        return self._learning_rate if given is None else _constant(given)


# A loop sends the same rate for many steps, and a schedule checks its numbers when it is made.
_constant = lru_cache(maxsize=64)(ConstantLR)

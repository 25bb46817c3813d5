"""Lock group of a simulated server: the real state machine, and values that are counts of pushes."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from shoal import errors
from shoal_server.shards.group.commit_gate import HOLD_S
from shoal_server.shards.group.input_log import COPY_WAIT_S, CopyState
from shoal_server.shards.group.input_logs import InputLogs
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.machine.state import GroupState
from simulation.invariants import Checker
from simulation.messages import CreateShards, Pulled, PushName, Stamp
from simulation.scheduler import Future, Scheduler


class Group:
    """A lock group of a job on one server: the primary or, if `follows` is set, the backup of another server's.

    It does what `GroupShell`, `LockGroup` and `CommitGate` do, without threads. `ReplicatedGroup` is in
    `simulation.nodes.replica`. Answers leave through the product's `InputLogs`.

    Args:
        server: name of the server.
        config: the request that created it.
        machine: the state machine.
        scheduler: the time.
        checker: is told what happens here.
        follows: for a backup, the term of its primary.

    Attributes:
        shards: its shards.
        number: names the group in its job: the smallest index of its shards.
        logs: the logs of the copies that get inputs from here.
        term: the term of the primary, as far as known.
    """

    def __init__(
        self,
        server: str,
        config: CreateShards,
        machine: GroupState,
        scheduler: Scheduler,
        checker: Checker,
        follows: int | None = None,
    ) -> None:
        self.server, self.config, self.generation = server, config, config.generation
        self.shards, self.number = frozenset(config.shards), min(config.shards)
        self.follows, self.term = follows is not None, follows or 0
        self.logs = InputLogs(config.job)
        self._moved = False  # other servers or lock groups have the shards now
        self._use(machine, checker)
        self._scheduler, self._checker = scheduler, checker
        self.staged: dict[str, PushName | None] = {}  # by worker, the name of its last staged push
        self.pushes: set[PushName] = set()
        self.held: set[PushName] = set()
        self.fenced: dict[str, int] = {}
        self.released: dict[tuple[str, int], int] = {}
        self.value = self.version = 0
        self.closed = False
        self.to_share: events.ShareNorm | None = None  # the squares that other servers still have to get
        self.waiting_cut: Future[tuple[events.AnswerCut, frozenset[PushName]]] | None = None
        self._stored_version = 0  # of the values: that of the machine, after its effects
        self._cut, self._until, self._passing = 0, 0.0, 0
        self._waiters: list[Future[None]] = []
        checker.created(self)

    def _use(self, machine: GroupState, checker: Checker) -> None:
        self.machine = machine
        machine.on_admission = lambda admission: checker.admitted(self, admission)

    def handle(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        """Handles an event and carries out the effects. If there is a backup, answers wait for it.

        The caller calls `confirm` before it answers.

        Raises:
            ShoalError: the machine refuses the event, or the group is gone, or a backup.
        """
        self.check_open()
        payload = event.payload if isinstance(event, events.PushStaged) else None
        if payload:
            self.logs.send_gradient(payload)
        try:
            effects = self._advance(event)
        except errors.ShoalError:
            if payload:
                self.logs.drop_gradient(payload)
            raise
        answers = [answer for effect in effects if (answer := self._answer(effect))]
        self.logs.add(event)
        self.logs.flush()
        self.logs.when_copied(self.logs.number, partial(_give, answers), partial(self._refuse, answers))
        if any(isinstance(effect, events.MeasureNorm) for effect in effects):
            effects += self.handle(events.NormMeasured((1.0,)))
        return effects

    def _advance(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        try:
            effects = self.machine.handle(event)
        finally:
            self.machine.validate()
        for effect in effects:
            self._carry_out(effect)
        self._checker.version_is(self, self.machine.version)
        return effects

    def _carry_out(self, effect: events.LockGroupEffect) -> None:
        match effect:
            case Apply():
                self._checker.applied(self, effect)
                self._stored_version += 1
            case events.ShareNorm():
                self.to_share = effect
            case events.AnswerCut() if self.waiting_cut:
                self.waiting_cut.set((effect, frozenset(self.pushes)))
                self.waiting_cut = None

    def _answer(self, effect: events.LockGroupEffect) -> "_Reply | None":
        """Returns the tickets that an effect answers, and the answer."""
        if isinstance(effect, events.AnswerPulls):
            return [*effect.tickets], Pulled(self._stored_version, effect.step)
        if isinstance(effect, events.RefusePull):
            return [effect.ticket], effect.error
        return None

    def _refuse(self, answers: "list[_Reply]") -> None:
        _give([(tickets, self._gone()) for tickets, _ in answers])

    async def confirm(self) -> None:
        """Waits until the backups have all inputs, as `InputLogs.wait` does with a thread.

        Raises:
            Moved: it does not get them in time, or the group was closed.
        """
        copied: Future[None] = Future()
        moved = errors.Moved(f"{self.config.job}: the backup has not confirmed the call", job=self.config.job)
        self.logs.when_copied(self.logs.number, partial(copied.set, None), partial(copied.fail, moved))
        if not copied.done:
            self._scheduler.after(COPY_WAIT_S, lambda: copied.fail(moved))
            await copied
        copied.result()

    def committed(self, stamp: Stamp, answer: events.AnswerPush) -> None:
        """Tells the checker of a commit that is answered."""
        if not answer.repeated:
            self._checker.committed(self, stamp)
        self.hold_name(stamp.worker, stamp.incarnation, stamp.step, answer)

    def hold_name(self, worker: str, incarnation: int, step: int, answer: events.AnswerPush) -> None:
        """Counts a push as accepted and not yet applied, if it is."""
        name = self.staged.get(worker)
        accepted = answer.outcome == "accepted" and name is not None and name not in self.pushes
        if accepted and name and (name.incarnation, name.step) == (incarnation, step):
            self.held.add(name)

    def fold(self, effects: Iterable[events.LockGroupEffect]) -> bool:
        """Returns whether the step that these effects seal has to be closed by `FoldsDone`."""
        folds = [effect for effect in effects if isinstance(effect, Fold)]
        return bool(folds) and folds[-1].seals

    def restore(self, pushes: Iterable[PushName], version: int, step: int) -> None:
        """Fills the group from a checkpoint."""
        self.check_open()
        self.handle(events.ValuesRestored(version, step))
        self.pushes = set(pushes)
        self.value, self._stored_version = len(self.pushes), version
        self._checker.restored(self)

    def pull(self, stamp: Stamp, ahead: int) -> Future[Pulled]:
        """Asks for the values. The result is there when the mode allows it."""
        ticket: Future[Pulled] = Future()
        self.handle(events.PullRequested(ticket, stamp.worker, stamp.incarnation, stamp.step, ahead))
        return ticket

    def abandon(self, ticket: Future[Pulled]) -> None:
        """Ends a waiting pull."""
        if not self.closed:
            self.handle(events.PullAbandoned(ticket))

    def close(self) -> None:
        """Refuses waiting and later calls."""
        if self.closed:
            return
        self.closed = True
        self._checker.closed(self)
        for ticket in [] if self.follows else self.machine.abandon_all():  # the tickets of a backup are numbers
            ticket.fail(self._gone())
        self.logs.close()
        if self.waiting_cut:
            self.waiting_cut.fail(self._gone())
        self._notify()

    def check_open(self) -> None:
        """Raises an error if the group is closed, or a backup."""
        if self.closed:
            raise self._gone()
        if self.follows:
            raise errors.Moved(f"{self.server} has the backup of lock group {self.number}")

    @property
    def awaits_decision(self) -> bool:
        """Whether the values may have updates that nobody was told of, because the backup may lack them."""
        return any(log.state in (CopyState.COMPLETE, CopyState.BROKEN) for log in self.logs)

    def _gone(self) -> errors.ShoalError:
        if self._moved:
            return errors.Moved(f"other servers or groups have the shards of lock group {self.number} now")
        return errors.UnknownJob(f"{self.config.job} was dropped on {self.server}")

    # The commit gate.

    @property
    def held_s(self) -> float:
        """Seconds until commits may pass."""
        return 0.0 if self.closed or not self._cut else self._until - self._scheduler.now

    async def enter_gate(self) -> None:
        """Waits while a cut holds the gate. `leave_gate` must follow."""
        while (left := self.held_s) > 0:
            await self._changed(left)
        self._cut = 0
        self._passing += 1

    def leave_gate(self) -> None:
        """Ends a commit."""
        self._passing -= 1
        self._notify()

    async def hold(self, cut: int) -> None:
        """Holds back new commits and waits for the running ones."""
        self._cut, self._until = cut, self._scheduler.now + HOLD_S
        while self._passing and (left := self.held_s) > 0:
            await self._changed(left)
        if self._passing:
            self._cut = 0
            raise errors.Overloaded("running commits took too long")

    def resume(self, cut: int) -> None:
        """Ends a cut that holds the gate."""
        if self._cut == cut and self._until < float("inf"):
            self._cut = 0
            self._notify()

    def take(self, cut: int) -> None:
        """Keeps the gate held while the snapshots are taken."""
        if self._cut != cut or self.held_s <= 0:
            raise errors.Cancelled(f"cut {cut} has expired")
        self._until = float("inf")

    def taken(self, pause_s: float) -> None:
        """Ends the hold some seconds after the snapshots."""
        self._until = self._scheduler.now + pause_s
        self._notify()

    async def _changed(self, seconds: float) -> None:
        waiter: Future[None] = Future()
        self._waiters.append(waiter)
        if seconds < float("inf"):
            self._scheduler.after(seconds, lambda: waiter.set(None))
        await waiter

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set(None)


# Tickets, and the values or the error that they get.
_Reply = tuple[list[Future[Pulled]], Pulled | errors.ShoalError]


def _give(answers: list[_Reply]) -> None:
    for tickets, answer in answers:
        for ticket in tickets:
            if isinstance(answer, errors.ShoalError):
                ticket.fail(answer)
            else:
                ticket.set(answer)


def answer_in(effects: Iterable[Any]) -> events.AnswerPush:
    """Returns the answer to a push among effects."""
    return events.only(effects, events.AnswerPush)


__all__ = ["Group", "answer_in"]

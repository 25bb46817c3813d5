"""Random histories of a lock group with copies: each copy does the same, and a refused event changes nothing."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shoal import consistency, errors, optim
from shoal._wire import Cursor
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import events, pulls
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Apply, Fold, PermitLimits
from shoal_server.shards.machine.replica_inputs import decode, encode
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.machine.worker_progress import WorkerProgress
from support.group_states import Numbered, number_of, plain, without_tickets, written
from support.run_lengths import draws

MODES = st.one_of(
    st.integers(1, 2).map(consistency.Synchronous),
    st.integers(0, 2).map(consistency.Synchronous),
    st.booleans().map(consistency.Asynchronous),
    st.integers(0, 3).map(consistency.BoundedStaleness),
)
LIMITS = st.sampled_from([None, PermitLimits(2, 3), PermitLimits(4, 4)])
PEERS = st.sampled_from([(), ("s1", "s2")])
RANKS = range(7)
FIRST = 1_000  # of the numbers of a primary: Python keeps no such number as one object


@dataclasses.dataclass
class Copy:
    state: GroupState
    unknown: set[int]  # tickets of pulls that waited when the copy was made


@dataclasses.dataclass
class Call:
    """A push whose gradient waits for a permit, or has one."""

    ticket: Numbered
    life: tuple[str, int]
    step: int
    wanted: bool | None = None  # None while it waits


class DrawnCopies(RuleBasedStateMachine):
    """Workers that pull, push, repeat themselves and die; calls that break; copies that are made and promoted."""

    @initialize(
        mode=MODES, limits=LIMITS, peers=PEERS, workers=st.integers(1, 6), room=st.sampled_from([0, 1, 1 << 14])
    )
    def start(
        self,
        mode: consistency.Consistency,
        limits: PermitLimits | None,
        peers: Sequence[str],
        workers: int,
        room: int,
    ) -> None:
        if peers and mode.joins_gradients:
            mode = consistency.Synchronous()  # others have all their shards on one server
        self.mode, self.limits, self.peers = mode, limits if mode.joins_gradients else None, peers
        self.room, pulls.MAX_WAITING_PULLS = room, room
        self.numbers, self.inputs = itertools.count(FIRST), itertools.count(1)
        self.state = GroupState("job", self.new_mode(), peers=peers)
        self.state.permits.limits = self.limits
        self.copies: list[Copy] = []
        self.waiting: dict[int, Numbered] = {}  # pulls
        self.calls: dict[int, Call] = {}
        self.released = self.folded = 0  # contributions that were released for folding, and that were folded
        self.incarnations = itertools.count(1)
        self.fenced: set[tuple[str, int]] = set()
        for _ in range(workers):
            self.join(0)

    def teardown(self) -> None:
        pulls.MAX_WAITING_PULLS = 1 << 14

    def new_mode(self) -> Any:
        return mode_for(self.mode, shares_norms=bool(self.peers))

    def fresh(self) -> Numbered:
        return Numbered(next(self.numbers))

    # The shell.

    def feed(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect] | None:
        """Handles an event, and sends it to the copies. Returns None if it is refused."""
        before = plain(self.state)
        try:
            effects = self.state.handle(event)
        except errors.ShoalError:
            assert plain(self.state) == before, "a refused event has changed something"
            return None
        self.state.validate()
        for copy in self.copies:
            self.check_copy(copy, event, effects)
        self.carry_out(effects)
        if any(isinstance(effect, events.MeasureNorm) for effect in effects):
            effects += self.feed(events.NormMeasured((float(self.state.version), 2.0))) or []
        if self.state.permits.waiting and self.folded < self.released:
            self.folded = self.released
            self.feed(events.Folded(self.folded))
        return effects

    def carry_out(self, effects: Sequence[events.LockGroupEffect]) -> None:
        for effect in effects:
            match effect:
                case Fold():
                    self.released += len(effect.contributions)
                case Apply():
                    self.folded = self.released
                case events.AnswerPulls():
                    for ticket in effect.tickets:
                        self.waiting.pop(number_of(ticket), None)
                case events.RefusePull():
                    self.waiting.pop(number_of(effect.ticket), None)
                case events.RefusePermit():
                    self.calls.pop(number_of(effect.ticket), None)
                case events.GrantPermit():
                    self.calls[number_of(effect.ticket)].wanted = effect.wanted

    def check_copy(self, copy: Copy, event: events.LockGroupEvent, effects: Sequence[events.LockGroupEffect]) -> None:
        message = encode(event, next(self.inputs), number_of, number_of).SerializeToString()
        found: Sequence[Any] = copy.state.handle(decode(pb.ReplicaInput.FromString(message), payload_of=int))
        copy.state.validate()
        expected: Sequence[Any] = without_tickets(effects, copy.unknown)
        if self.room < 1 << 14:  # it has fewer waiting pulls, and so refuses fewer
            kinds = (events.AnswerPulls, events.RefusePull)
            expected, found = ([it for it in them if not isinstance(it, kinds)] for them in (expected, found))
        assert plain(found) == plain(expected)
        assert copy.state.progress() == self.state.progress()
        for worker, it in self.state.progress().items():
            for step in range(max(0, it.committed - 1), it.finished + 1):
                known = [self.answer(state, worker, it.incarnation, step) for state in (self.state, copy.state)]
                assert known[0] == known[1]
        if self.state.is_copyable and copy.state.is_copyable:
            assert written(copy.state) == written(self.state)
        else:
            assert self.room < 1 << 14 or self.state.is_copyable == copy.state.is_copyable

    def answer(self, state: GroupState, worker: str, incarnation: int, step: int) -> Any:
        try:
            return state.answer_to(worker, incarnation, step)
        except errors.ShoalError as error:
            return plain(error)

    # Copies.

    @precondition(lambda self: len(self.copies) < 2 and self.state.is_copyable)
    @rule()
    def copy(self) -> None:
        message = pb.GroupState.FromString(written(self.state).SerializeToString())
        state = GroupState.restored(message, "job", self.new_mode(), payload_of=int, peers=self.peers)
        state.permits.limits = self.limits
        state.validate()
        assert written(state) == message
        self.copies.append(Copy(state, set(self.waiting)))

    @precondition(lambda self: self.copies)
    @rule()
    def promote(self) -> None:
        """The primary dies, and callers lose their calls."""
        self.state = self.copies.pop(0).state
        self.copies.clear()
        self.state.forget_callers()
        self.state.validate()
        self.waiting.clear()
        self.calls.clear()
        self.numbers = itertools.count(FIRST)
        assert self.state.waiting == self.state.permits.waiting == 0

    @precondition(lambda self: len(self.copies) == 2)
    @rule()
    def hand_over(self) -> None:
        """The first copy becomes the primary, and the second one, which has had the same events, is its copy."""
        first, second = self.copies
        self.state, self.copies = first.state, [Copy(second.state, set())]
        self.waiting.clear()
        self.calls.clear()
        self.feed(events.CallersForgotten())
        assert self.state.waiting == self.state.permits.waiting == 0

    # Workers.

    def life(self, data: st.DataObject) -> tuple[str, int]:
        """Draws a worker; sometimes one that is not admitted."""
        lives = [(worker, clock.incarnation) for worker, clock in self.state.clocks.items()]
        return data.draw(st.sampled_from([*lives, *lives, ("w1", 1), ("stranger", 1)]))

    def step(self, data: st.DataObject, life: tuple[str, int]) -> int:
        clock = self.state.clocks.get(life[0])
        steps = clock.steps if clock else 0
        return max(0, data.draw(st.sampled_from([steps, steps, steps, steps - 1, steps - 2, steps + 1, 1 << 53])))

    @rule(name=st.integers(0, 5), repeats=st.booleans())
    def join(self, name: int, repeats: bool = False) -> None:
        worker, taken = f"w{name}", {clock.rank for clock in self.state.clocks.values()}
        clock = self.state.clocks.get(worker)
        if clock and not repeats:
            names = [f"w{it}" for it in range(6) if f"w{it}" not in self.state.clocks]
            if not names:
                return
            worker, clock = names[0], None
        if clock:
            self.feed(events.WorkerAdmitted(worker, clock.incarnation + repeats, clock.rank))
        else:
            self.feed(events.WorkerAdmitted(worker, next(self.incarnations), min(set(RANKS) - taken)))

    @rule(data=st.data(), ahead=st.sampled_from([0, 0, 0, 1, 1, 2]))
    def pull(self, data: st.DataObject, ahead: int) -> None:
        life, ticket = self.life(data), self.fresh()
        self.waiting[ticket.number] = ticket
        if self.feed(events.PullRequested(ticket, *life, self.step(data, life), ahead)) is None:
            del self.waiting[ticket.number]

    @rule()
    def read(self) -> None:
        ticket = self.fresh()
        self.waiting[ticket.number] = ticket
        self.feed(events.PullRequested(ticket, "", 0, 3))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        ticket = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self.feed(events.PullAbandoned(ticket))

    @rule(data=st.data(), skips=st.sampled_from([False, False, False, True]), commits=st.booleans())
    def push(self, data: st.DataObject, skips: bool, commits: bool) -> None:
        life = self.life(data)
        step = self.step(data, life)
        if skips or not self.limits:
            self.stage(life, step, None if skips else self.fresh())
            if commits:
                self.feed(events.PushCommitted(*life, step, defers=True))
            return
        self.open(life, step)

    def open(self, life: tuple[str, int], step: int) -> None:
        call = Call(self.fresh(), life, step)
        self.calls[call.ticket.number] = call
        effects = self.feed(events.PushOpened(call.ticket, *life, step))
        if effects is None or any(isinstance(effect, events.AnswerPush) for effect in effects):
            del self.calls[call.ticket.number]

    def stage(self, life: tuple[str, int], step: int, payload: Any) -> None:
        squares = 2.5 if self.peers and not self.mode.joins_gradients else None
        cursor = Cursor(step + 1, 8) if step % 2 else None
        weight = 0.0 if payload is None else 1.0 + step
        self.feed(events.PushStaged(*life, step, weight, max(0, self.state.version - 1), payload, cursor, squares))

    @precondition(lambda self: self.limits)
    @rule(data=st.data(), silent=st.integers(0, 2))
    def open_most(self, data: st.DataObject, silent: int) -> None:
        """Many pushes of the open step arrive, so that permits are short, and the step may be decided."""
        lives = [(worker, clock.incarnation) for worker, clock in self.state.clocks.items()]
        for life in data.draw(st.permutations(lives))[silent:]:
            if life not in [call.life for call in self.calls.values()]:
                self.open(life, self.state.mode.next_step(0))

    @precondition(lambda self: any(call.wanted is not None for call in self.calls.values()))
    @rule(data=st.data(), commits=st.booleans())
    def send(self, data: st.DataObject, commits: bool) -> None:
        """A push that has its permit sends its gradient."""
        ready = sorted(number for number, call in self.calls.items() if call.wanted is not None)
        self.send_call(self.calls.pop(data.draw(st.sampled_from(ready))), commits=commits)

    def send_call(self, call: Call, *, commits: bool) -> None:
        self.stage(call.life, call.step, self.fresh())
        if commits:
            self.feed(events.PushCommitted(*call.life, call.step, defers=True))

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = self.calls.pop(data.draw(st.sampled_from(sorted(self.calls))))
        self.feed(events.PushWithdrawn(call.ticket, call.life[0]))

    @rule(data=st.data(), defers=st.booleans())
    def commit(self, data: st.DataObject, defers: bool) -> None:
        life = self.life(data)
        self.feed(events.PushCommitted(*life, self.step(data, life), defers))

    @rule()
    def finish_folding(self) -> None:
        self.folded = self.released
        self.feed(events.Folded(self.folded))
        self.feed(events.FoldsDone())

    @rule(server=st.sampled_from(["s1", "s2", "s3"]), behind=st.sampled_from([0, 0, 0, 1, -1]))
    def share_norm(self, server: str, behind: int) -> None:
        self.feed(events.NormReceived(server, max(0, self.state.mode.next_step(0) - behind), (1.0, 0.5)))

    @rule(data=st.data(), release=st.booleans(), committed=st.integers(0, 2))
    def die(self, data: st.DataObject, release: bool, committed: int) -> None:
        life = self.life(data)
        effects = self.feed(events.WorkerFenced(*life))
        assert effects is not None
        self.fenced.add(life)
        if release:
            steps = events.only(effects, events.AnswerFence).committed_steps
            self.feed(events.WorkerReleased(*life, steps + committed))
        for number in [number for number, call in self.calls.items() if call.life == life]:
            call = self.calls.pop(number)
            self.feed(events.PushWithdrawn(call.ticket, call.life[0]))

    @rule(data=st.data(), more=st.integers(0, 2), wrong=st.sampled_from([False, False, True]))
    def cut(self, data: st.DataObject, more: int, wrong: bool) -> None:
        progress = self.state.progress()
        if progress and more:
            worker = data.draw(st.sampled_from(sorted(progress)))
            it = progress[worker]
            committed = it.finished + more - 1
            progress[worker] = WorkerProgress(it.incarnation, committed, committed + (more == 2))
        if wrong:
            progress["stranger"] = WorkerProgress(1, 1 << 53, 1 << 53)
        self.feed(events.CutRequested(progress))

    @rule(rate=st.sampled_from([0.5, 0.25]))
    def set_rate(self, rate: float) -> None:
        self.feed(events.LearningRateSet(optim.ConstantLR(rate, warmup_steps=3)))

    @rule()
    def everybody_gets_on(self) -> None:
        """From any state, workers that continue to pull and push are never stuck."""
        for worker, clock in list(self.state.clocks.items()):
            if (worker, clock.incarnation) in self.fenced:
                self.feed(events.WorkerReleased(worker, clock.incarnation, 0))
        pulls.MAX_WAITING_PULLS = 1 << 14
        goal = max((clock.steps for clock in self.state.clocks.values()), default=0) + 2
        for _ in range(30 * goal):
            for worker, clock in list(self.state.clocks.items()):
                self.get_on(worker, clock.incarnation)
            if self.peers:
                self.share_norm("s1", 0)
                self.share_norm("s2", 0)
            self.finish_folding()
            if all(clock.steps >= goal for clock in self.state.clocks.values()):
                break
        pulls.MAX_WAITING_PULLS = self.room
        assert all(clock.steps >= goal for clock in self.state.clocks.values()), self.state

    def get_on(self, worker: str, incarnation: int) -> None:
        """A worker pulls its next step, and pushes it if the mode lets it."""
        ready = [number for number, call in self.calls.items() if call.life == (worker, incarnation)]
        for number in ready:
            if number in self.calls and self.calls[number].wanted is not None:
                self.send_call(self.calls.pop(number), commits=True)
        step = self.state.mode.next_step(self.state.clocks[worker].steps)
        ticket = self.fresh()
        self.waiting[ticket.number] = ticket
        self.feed(events.PullRequested(ticket, worker, incarnation, step))
        if self.waiting.pop(ticket.number, None):
            self.feed(events.PullAbandoned(ticket))
        elif not self.limits:
            self.send_call(Call(ticket, (worker, incarnation), step), commits=True)
        elif not any(call.life == (worker, incarnation) for call in self.calls.values()):
            self.open((worker, incarnation), step)


TestDrawnCopies = DrawnCopies.TestCase
TestDrawnCopies.settings = settings(max_examples=draws(60), stateful_step_count=40, deadline=None)

"""State machine of a lock group: scripted cases, and random histories compared with a model that is obviously right."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal import consistency, errors
from shoal._wire import PushCounts
from shoal._wire.limits import MAX_STEP
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import (
    Admission,
    AnswerAdmission,
    AnswerCut,
    AnswerFence,
    AnswerPulls,
    AnswerPush,
    CutRequested,
    FoldsDone,
    LockGroupEffect,
    LockGroupEvent,
    Overwrite,
    PullAbandoned,
    PullRequested,
    PushCommitted,
    PushStaged,
    RefusePull,
    ValuesAssigned,
    WorkerAdmitted,
    WorkerFenced,
    WorkerReleased,
)
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.machine.state import GroupState
from support.run_lengths import draws


def shard(mode: consistency.Consistency, workers: Iterable[str] = ()) -> GroupState:
    state = GroupState("job/0", mode_for(mode))
    for rank, worker in enumerate(workers):
        state.handle(WorkerAdmitted(worker, 1, rank))
    return state


def handle(state: GroupState, event: LockGroupEvent) -> list[LockGroupEffect]:
    effects = state.handle(event)
    state.validate()
    return effects


def stage(
    state: GroupState,
    worker: str,
    step: int,
    payload: str | None = "g",
    *,
    weight: float = 1.0,
    version: int | None = None,
    incarnation: int = 1,
) -> list[LockGroupEffect]:
    version = state.version if version is None else version
    return handle(state, PushStaged(worker, incarnation, step, weight, version, payload))


def push(state: GroupState, worker: str, step: int, payload: str | None = "g", **kwargs: Any) -> list[LockGroupEffect]:
    stage(state, worker, step, payload, **kwargs)
    return handle(state, PushCommitted(worker, kwargs.get("incarnation", 1), step))


def pull(
    state: GroupState, worker: str, step: int, ticket: str | None = None, *, ahead: int = 0
) -> list[LockGroupEffect]:
    return handle(state, PullRequested(ticket or (worker, step + ahead), worker, 1, step, ahead))


def applied(effects: Sequence[LockGroupEffect]) -> list[list[str]]:
    return [[part.payload for part in effect.contributions] for effect in effects if isinstance(effect, Apply)]


def answered(effects: Sequence[LockGroupEffect]) -> list[tuple[str, int]]:
    return [ticket for effect in effects if isinstance(effect, AnswerPulls) for ticket in effect.tickets]


def outcome(effects: Sequence[LockGroupEffect]) -> str:
    (answer,) = [effect for effect in effects if isinstance(effect, AnswerPush)]
    return answer.outcome


def last_answer(effects: Sequence[LockGroupEffect]) -> AnswerPush:
    """Returns the last effect, which has to be the answer to a push."""
    answer = effects[-1]
    assert isinstance(answer, AnswerPush)
    return answer


def pushes_at_cut(state: GroupState) -> dict[str, PushCounts]:
    answer = handle(state, CutRequested({}))[-1]
    assert isinstance(answer, AnswerCut)
    return dict(answer.pushes)


class TestPushesAtCut:
    def test_count_once_applied(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0, weight=8.0)
        assert pushes_at_cut(state) == {"a": PushCounts(1), "b": PushCounts(1)}, "the step is open"
        push(state, "b", 0, weight=4.0)
        push(state, "a", 1, weight=8.0)
        assert pushes_at_cut(state) == {"a": PushCounts(1, 1, 8), "b": PushCounts(1, 1, 4)}

    def test_lack_skipped_and_dropped_ones(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "ab")
        push(state, "a", 0)
        assert outcome(push(state, "b", 0)) == "dropped_late"
        push(state, "a", 1, None, weight=0.0)
        assert pushes_at_cut(state) == {"a": PushCounts(1, 1, 1), "b": PushCounts(1)}

    def test_begin_again_with_each_incarnation(self) -> None:
        state = shard(consistency.Asynchronous(), "a")
        push(state, "a", 0)
        handle(state, WorkerReleased("a", 1, 1))
        assert pushes_at_cut(state) == {}
        handle(state, WorkerAdmitted("a", 2, 0))
        push(state, "a", 1, incarnation=2, weight=1e300)
        push(state, "a", 2, incarnation=2, weight=1e300)
        assert pushes_at_cut(state) == {"a": PushCounts(2, 2, MAX_STEP - 1)}, "as large as a report allows"


class TestSynchronous:
    def test_a_step_is_applied_once_in_order_of_rank_when_the_last_gradient_comes(self) -> None:
        state = shard(consistency.Synchronous(), "abc")
        assert applied(push(state, "c", 0, "gc")) == []
        assert applied(push(state, "a", 0, "ga")) == []
        assert applied(push(state, "b", 0, "gb")) == [["ga", "gb", "gc"]]
        assert state.version == 1

    def test_a_pull_waits_for_its_step_and_is_answered_after_the_update(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0)
        assert answered(pull(state, "a", 1)) == []
        effects = push(state, "b", 0)
        kinds = [type(effect) for effect in effects]
        assert kinds.index(Apply) < kinds.index(AnswerPulls)
        assert answered(effects) == [("a", 1)]

    def test_one_effect_answers_all_pulls_of_a_step(self) -> None:
        """The group's lock is held while effects are made, so their number must not grow with the workers."""
        state = shard(consistency.Synchronous(), "abcdefgh")
        for worker in "abcdefg":
            push(state, worker, 0)
            pull(state, worker, 1)
        effects = push(state, "h", 0)
        assert [len(effect.tickets) for effect in effects if isinstance(effect, AnswerPulls)] == [7]

    def test_an_update_counts_no_push_under_the_lock_and_the_next_ones_do(self) -> None:
        state = shard(consistency.Synchronous(), "abcdefgh")
        for step in range(9):
            for worker in "abcdefgh":
                push(state, worker, step)
            assert state.applied.queued == 8, "the work that is left"
        assert {worker: it.pushes for worker, it in state.applied.counts.items()} == dict.fromkeys("abcdefgh", 9)

    def test_the_slowest_backup_worker_is_dropped_and_told_where_the_others_are(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "abc")
        push(state, "a", 0, "ga")
        assert applied(push(state, "b", 0, "gb")) == [["ga", "gb"]]
        push(state, "a", 1)
        push(state, "b", 1)
        effects = push(state, "c", 0, "late")
        assert outcome(effects) == "dropped_late"
        assert applied(effects) == []
        assert last_answer(effects).step == 2
        assert state.clocks["c"].steps == 2

    def test_a_late_worker_learns_the_open_step_from_its_pull(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "ab")
        pull(state, "b", 0)
        push(state, "a", 0)
        push(state, "a", 1)
        (answer,) = pull(state, "b", 0, "again")
        assert answer == AnswerPulls(("again",), 2)

    def test_a_skipped_step_keeps_nobody_waiting_and_applies_nothing(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        assert outcome(push(state, "a", 0, None, weight=0.0)) == "skipped"
        assert applied(push(state, "b", 0, "gb")) == [["gb"]]
        push(state, "a", 1, None, weight=0.0)
        assert applied(push(state, "b", 1, None, weight=0.0)) == []
        assert state.version == 1
        assert answered(pull(state, "a", 2)) == [("a", 2)]

    def test_workers_without_data_do_not_close_a_step_over_a_backup_that_has_some(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "abc")
        push(state, "a", 0, None, weight=0.0)
        push(state, "b", 0, None, weight=0.0)
        effects = push(state, "c", 0, "gc")
        assert outcome(effects) == "accepted"
        assert applied(effects) == [["gc"]]

    def test_a_dead_worker_is_no_longer_waited_for(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0, "ga")
        pull(state, "a", 1)
        handle(state, WorkerFenced("b", 1))
        assert state.version == 0
        effects = handle(state, WorkerReleased("b", 1, 0))
        assert applied(effects) == [["ga"]]
        assert answered(effects) == [("a", 1)]

    def test_the_last_worker_that_leaves_closes_the_step_of_one_that_left_before(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0, "ga")
        handle(state, WorkerReleased("a", 1, 1))
        assert applied(handle(state, WorkerReleased("b", 1, 0))) == [["ga"]]

    def test_a_newcomer_joins_at_the_open_step(self) -> None:
        state = shard(consistency.Synchronous(), "a")
        for step in range(3):
            push(state, "a", step)
        assert handle(state, WorkerAdmitted("b", 2, 1)) == [AnswerAdmission(3)]
        assert handle(state, WorkerAdmitted("b", 2, 1)) == [AnswerAdmission(3)]  # repeated
        assert applied(push(state, "a", 3)) == []
        assert answered(pull(state, "a", 4)) == []

    def test_a_newcomer_that_joins_ahead_is_not_waited_for_before_its_step(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0, "ga")
        handle(state, WorkerAdmitted("c", 2, 2))
        handle(state, PullRequested("t", "c", 2, 1))  # another shard has closed step 0 already
        assert applied(push(state, "b", 0, "gb")) == [["ga", "gb"]]

    def test_a_dead_worker_uses_up_a_backup(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "abc")
        handle(state, WorkerReleased("c", 1, 0))
        assert applied(push(state, "a", 0, "ga")) == [], "two of the three that there were have to contribute"
        assert applied(push(state, "b", 0, "gb")) == [["ga", "gb"]]

    def test_values_are_assigned_before_training_only(self) -> None:
        state = shard(consistency.Synchronous(), "a")
        assert handle(state, ValuesAssigned()) == [Overwrite()]
        pull(state, "a", 0)
        with pytest.raises(errors.BadRequest, match="training has begun"):
            handle(state, ValuesAssigned())


class TestBoundedStaleness:
    @pytest.mark.parametrize("bound", [0, 1, 4])
    def test_a_worker_gets_exactly_bound_steps_ahead(self, bound: int) -> None:
        state = shard(consistency.BoundedStaleness(bound), "ab")
        for step in range(bound + 1):
            assert answered(pull(state, "a", step)) == [("a", step)]
            assert outcome(push(state, "a", step)) == "accepted"
        assert answered(pull(state, "a", bound + 1)) == []
        assert answered(push(state, "b", 0)) == [("a", bound + 1)]

    def test_a_dead_straggler_lets_the_others_go(self) -> None:
        state = shard(consistency.BoundedStaleness(0), "ab")
        push(state, "a", 0)
        pull(state, "a", 1)
        assert answered(handle(state, WorkerReleased("b", 1, 0))) == [("a", 1)]

    def test_a_push_does_not_get_around_the_bound(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        push(state, "a", 0)
        push(state, "a", 1)
        with pytest.raises(errors.BadRequest, match="pull first"):
            push(state, "a", 2)

    def test_a_newcomer_starts_among_the_slowest_and_holds_nobody_up(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        for step in range(5):
            push(state, "a", step)
            push(state, "b", step)
        push(state, "b", 5)
        assert answered(pull(state, "b", 7)) == []
        handle(state, WorkerAdmitted("c", 7, 2))
        assert state.clocks["c"].steps == 5
        assert answered(pull(state, "b", 6)) == [("b", 6)]


class TestAsynchronous:
    def test_every_push_is_applied_and_its_staleness_told(self) -> None:
        state = shard(consistency.Asynchronous(), "ab")
        push(state, "a", 0, version=0)
        push(state, "a", 1, version=1)
        effects = push(state, "b", 0, version=0)
        assert last_answer(effects).staleness == 2
        update = effects[0]
        assert isinstance(update, Apply)
        assert update.learning_rate_scale == 1.0

    def test_the_learning_rate_is_divided_by_the_staleness_when_asked(self) -> None:
        state = shard(consistency.Asynchronous(scale_by_staleness=True), "ab")
        for step in range(4):
            push(state, "a", step)
        (update, _) = push(state, "b", 0, version=0)
        assert isinstance(update, Apply)
        assert update.learning_rate_scale == 0.25


class TestPullsAhead:
    """A pull of a worker at `step` for the values of the step after."""

    def test_it_passes_by_the_steps_before_its_own_and_not_its_own(self) -> None:
        state = shard(consistency.Asynchronous(), "ab")
        assert pull(state, "a", 3, "t", ahead=1) == [AnswerPulls(("t",), 4)]
        assert state.clocks["a"].steps == 3
        assert outcome(push(state, "a", 3)) == "accepted"
        assert state.clocks["a"].steps == 4

    @pytest.mark.parametrize("bound", [1, 4])
    def test_it_is_let_through_when_the_step_it_is_for_may_begin(self, bound: int) -> None:
        state = shard(consistency.BoundedStaleness(bound), "ab")
        for step in range(bound):
            assert answered(pull(state, "a", step, ahead=1)) == [("a", step + 1)]
            push(state, "a", step)
        assert answered(pull(state, "a", bound, ahead=1)) == []
        assert answered(push(state, "b", 0)) == [("a", bound + 1)]

    def test_its_own_push_may_come_while_it_waits(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        push(state, "a", 0)
        assert answered(pull(state, "a", 1, ahead=1)) == []
        effects = push(state, "a", 1)
        assert (outcome(effects), answered(effects)) == ("accepted", [])
        with pytest.raises(errors.BadRequest, match="pull first"):
            push(state, "a", 2)
        effects = push(state, "b", 0)
        assert answered(effects) == [("a", 2)]
        assert outcome(push(state, "a", 2)) == "accepted"

    def test_its_own_push_may_come_once_it_is_answered(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        assert answered(pull(state, "a", 0, ahead=1)) == [("a", 1)]
        assert outcome(push(state, "a", 0)) == "accepted"
        assert last_answer(push(state, "a", 0)).outcome == "accepted", "a repeat is answered as the first was"
        assert outcome(push(state, "a", 1)) == "accepted"

    def test_with_bound_0_it_waits_for_everybodys_push_and_its_own(self) -> None:
        state = shard(consistency.BoundedStaleness(0), "ab")
        assert answered(pull(state, "a", 0, ahead=1)) == []
        assert answered(push(state, "b", 0)) == []
        assert answered(push(state, "a", 0)) == [("a", 1)]

    def test_in_synchronous_mode_it_is_answered_when_the_step_closes(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        assert answered(pull(state, "a", 0, ahead=1)) == []
        assert answered(push(state, "a", 0, "ga")) == []
        effects = push(state, "b", 0, "gb")
        kinds = [type(effect) for effect in effects]
        assert applied(effects) == [["ga", "gb"]]
        assert kinds.index(Apply) < kinds.index(AnswerPulls)
        assert [effect for effect in effects if isinstance(effect, AnswerPulls)] == [AnswerPulls((("a", 1),), 1)]

    def test_who_was_overtaken_by_then_learns_the_open_step(self) -> None:
        state = shard(consistency.Synchronous(backup_workers=1), "ab")
        assert answered(pull(state, "b", 0, ahead=1)) == []
        assert answered(push(state, "a", 0)) == [("b", 1)]
        push(state, "a", 1)
        assert pull(state, "b", 0, "again", ahead=1) == [AnswerPulls(("again",), 2)]

    def test_the_death_of_the_slowest_lets_it_go(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        push(state, "a", 0)
        pull(state, "a", 1, ahead=1)
        assert answered(handle(state, WorkerReleased("b", 1, 0))) == [("a", 2)]

    def test_its_workers_death_ends_it(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        push(state, "a", 0)
        pull(state, "a", 1, ahead=1)
        effect, _ = handle(state, WorkerFenced("a", 1))
        assert isinstance(effect, RefusePull)
        assert state.waiting == 0

    @pytest.mark.parametrize("ahead", [2, 9])
    def test_nobody_looks_further_ahead(self, ahead: int) -> None:
        state = shard(consistency.Asynchronous(), "a")
        with pytest.raises(errors.BadRequest, match=f"a pull is {ahead} steps ahead; the maximum is 1"):
            pull(state, "a", 5, ahead=ahead)
        assert state.clocks["a"].steps == 0

    @pytest.mark.parametrize("ahead", [0, 1, 9])
    def test_a_reader_gets_what_there_is(self, ahead: int) -> None:
        state = shard(consistency.BoundedStaleness(0), "a")
        assert handle(state, PullRequested("t", "", 0, 7, ahead)) == [AnswerPulls(("t",), 7)]
        state.handle(ValuesAssigned())  # it has not begun training

    def test_an_admission_has_the_step_that_the_values_are_for(self) -> None:
        state = shard(consistency.BoundedStaleness(1), "ab")
        admissions: list[Admission] = []
        state.on_admission = admissions.append
        pull(state, "a", 0, ahead=1)
        push(state, "a", 0)
        pull(state, "a", 1, ahead=1)
        push(state, "b", 0)
        assert [(entry.kind, entry.worker, entry.step, entry.slowest) for entry in admissions] == [
            ("pull", "a", 1, 0),
            ("push", "a", 0, 0),
            ("push", "b", 0, 0),
            ("pull", "a", 2, 1),
        ]


class TestPushes:
    def test_a_repeat_gets_the_first_answer_and_changes_nothing(self) -> None:
        state = shard(consistency.Asynchronous(), "ab")
        first = push(state, "a", 0)[-1]
        push(state, "b", 0)
        assert push(state, "a", 0) == [first]
        assert stage(state, "a", 0) == [first]
        assert state.version == 2

    def test_an_older_step_is_refused(self) -> None:
        state = shard(consistency.Asynchronous(), "a")
        push(state, "a", 0)
        push(state, "a", 1)
        with pytest.raises(errors.BadRequest, match="has finished 2 steps"):
            push(state, "a", 0)

    def test_a_staged_push_counts_for_nothing_until_it_is_committed(self) -> None:
        state = shard(consistency.Asynchronous(), "a")
        assert outcome(stage(state, "a", 0)) == "staged"
        assert state.version == 0
        with pytest.raises(errors.NotStaged):
            handle(state, PushCommitted("a", 1, 1))

    @pytest.mark.parametrize(("committed_elsewhere", "version"), [(0, 0), (1, 1)])
    def test_a_dead_workers_staged_push_counts_only_if_it_does_elsewhere(
        self, committed_elsewhere: int, version: int
    ) -> None:
        state = shard(consistency.Asynchronous(), "ab")
        stage(state, "a", 0)
        assert handle(state, WorkerFenced("a", 1)) == [AnswerFence(0)]
        handle(state, WorkerReleased("a", 1, committed_elsewhere))
        assert state.version == version
        handle(state, WorkerReleased("a", 1, committed_elsewhere))  # repeated
        assert state.version == version

    def test_a_dead_workers_push_that_it_had_abandoned_counts_nowhere(self) -> None:
        """Staged here, refused elsewhere for NaN; the next step was passed by, and that was told elsewhere only."""
        state = shard(consistency.Asynchronous(), "ab")
        push(state, "a", 0)
        stage(state, "a", 1)
        handle(state, WorkerFenced("a", 1))
        assert applied(handle(state, WorkerReleased("a", 1, 3))) == []
        assert state.version == 1

    def test_strangers_and_old_lives_are_fenced(self) -> None:
        state = shard(consistency.Asynchronous(), "a")
        for worker, incarnation in (("x", 1), ("a", 2)):
            with pytest.raises(errors.Fenced):
                push(state, worker, 0, incarnation=incarnation)
        handle(state, WorkerFenced("a", 1))
        with pytest.raises(errors.Fenced, match="join the job again"):
            pull(state, "a", 0)
        handle(state, WorkerFenced("b", 4))
        with pytest.raises(errors.Fenced):  # an admission that was delayed on its way
            handle(state, WorkerAdmitted("b", 3, 3))

    def test_a_fenced_workers_waiting_pulls_are_refused(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0)
        pull(state, "a", 1)
        effect, answer = handle(state, WorkerFenced("a", 1))
        assert answer == AnswerFence(1)
        assert isinstance(effect, RefusePull)
        assert isinstance(effect.error, errors.Fenced)
        assert state.waiting == 0

    def test_an_abandoned_pull_is_forgotten(self) -> None:
        state = shard(consistency.Synchronous(), "ab")
        push(state, "a", 0)
        pull(state, "a", 1)
        handle(state, PullAbandoned(("a", 1)))
        assert answered(push(state, "b", 0)) == []


MODES = st.one_of(
    st.integers(0, 2).map(consistency.Synchronous),
    st.booleans().map(consistency.Asynchronous),
    st.integers(0, 4).map(consistency.BoundedStaleness),
)


class DrawnHistory(RuleBasedStateMachine):
    """Workers that join, pull, pull ahead, push, repeat themselves, pass steps by and die, in any order."""

    @initialize(mode=MODES, workers=st.integers(1, 4))
    def start(self, mode: consistency.Consistency, workers: int) -> None:
        self.mode, self.state = mode, GroupState("job/0", mode_for(mode))
        self.incarnations = 0
        self.steps: dict[tuple[str, int], int] = {}  # live lives: the step each is at
        self.may_push: set[tuple[str, int]] = set()  # lives that have the values of the step they are at
        self.fetched: dict[tuple[str, int], int] = {}  # lives that have values of the step after: of which
        self.committed: dict[str, str] = {}  # payload -> outcome
        self.applied: list[str] = []
        self.folded: list[str] = []  # of the open step
        for _ in range(workers):
            self.join()

    def check_effect(self, effects: Sequence[LockGroupEffect]) -> AnswerPush | None:
        answer = None
        for effect in effects:
            match effect:
                case Fold(contributions):
                    self.folded += [part.payload for part in contributions]
                case Apply(contributions):
                    assert [part.payload for part in contributions[: effect.folded]] == self.folded
                    self.folded = []
                    ranks = [part.rank for part in contributions]
                    assert ranks == sorted(ranks)
                    self.applied += [part.payload for part in contributions]
                case AnswerPulls(tickets, step):
                    for life, asked in tickets:
                        self.check_answered(life, asked, step)
                case AnswerPush():
                    answer = effect
        return answer

    def check_answered(self, life: tuple[str, int], asked: int, step: int) -> None:
        assert life in self.steps
        assert step >= asked
        if isinstance(self.mode, consistency.BoundedStaleness):
            assert asked - min(self.steps.values()) <= self.mode.bound
        if self.steps[life] == asked:
            self.steps[life] = step
            self.may_push.add(life)
        elif self.steps[life] == asked - 1:
            self.fetched[life] = step

    @precondition(lambda self: len(self.steps) < 5)
    @rule()
    def join(self) -> None:
        self.incarnations += 1
        life = (f"w{self.incarnations % 7}", self.incarnations)
        if any(worker == life[0] for worker, _ in self.steps):
            return
        rank = min(set(range(9)) - {clock.rank for clock in self.state.clocks.values()})
        (answer,) = self.state.handle(WorkerAdmitted(*life, rank))
        assert isinstance(answer, AnswerAdmission)
        self.steps[life] = answer.step

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(sorted(self.steps)))
        step = self.steps[life]
        self.check_effect(self.state.handle(PullRequested((life, step), *life, step)))

    @precondition(lambda self: self.may_push)
    @rule(data=st.data())
    def pull_ahead(self, data: st.DataObject) -> None:
        """Pulls the next step's values, as a worker does that is about to compute this step."""
        self.pull_ahead_of(data.draw(st.sampled_from(sorted(self.may_push))))

    def pull_ahead_of(self, life: tuple[str, int]) -> None:
        step = self.steps[life]
        self.check_effect(self.state.handle(PullRequested((life, step + 1), *life, step, 1)))

    @precondition(lambda self: self.may_push)
    @rule(data=st.data(), skip=st.booleans(), repeats=st.integers(0, 2), defers=st.booleans())
    def push(self, data: st.DataObject, skip: bool, repeats: int, defers: bool) -> None:
        life = data.draw(st.sampled_from(sorted(self.may_push)))
        self.check_push_once(life, skip=skip, repeats=repeats, defers=defers)

    @rule()
    def finish_folding(self) -> None:
        """As the thread does that has folded what was left of a step that is to close."""
        self.check_effect(self.state.handle(FoldsDone()))

    def check_push_once(
        self, life: tuple[str, int], *, skip: bool = False, repeats: int = 0, defers: bool = False
    ) -> None:
        step = self.steps[life]
        payload = None if skip else f"{life}@{step}"
        self.may_push.discard(life)
        self.steps[life] = step + 1  # before the pulls that this push lets through
        answers = []
        for _ in range(repeats + 1):
            self.check_effect(self.state.handle(PushStaged(*life, step, 0.0 if skip else 1.0, 0, payload)))
            answers.append(self.check_effect(self.state.handle(PushCommitted(*life, step, defers))))
        first = answers[0]
        assert first is not None
        assert all(answer == first for answer in answers)
        if payload:
            assert payload not in self.committed
            self.committed[payload] = first.outcome
        self.steps[life] = max(self.steps[life], first.step)
        if self.fetched.pop(life, None) == self.steps[life]:
            self.may_push.add(life)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), staged=st.booleans())
    def die(self, data: st.DataObject, staged: bool) -> None:
        life = data.draw(st.sampled_from(sorted(self.steps)))
        step = self.steps.pop(life)
        if staged and life in self.may_push:
            self.check_effect(self.state.handle(PushStaged(*life, step, 1.0, 0, "never")))
        self.may_push.discard(life)
        self.fetched.pop(life, None)
        effects = self.state.handle(WorkerFenced(*life))
        self.check_effect(effects)
        fenced = effects[-1]
        assert isinstance(fenced, AnswerFence)
        self.check_effect(self.state.handle(WorkerReleased(*life, fenced.committed_steps)))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.validate()
        assert len(self.applied) == len(set(self.applied)), "a push was applied twice"
        assert "never" not in self.applied
        assert all(self.committed[payload] == "accepted" for payload in self.applied if payload in self.committed)
        if not isinstance(self.mode, consistency.Synchronous):
            accepted = {payload for payload, outcome in self.committed.items() if outcome == "accepted"}
            assert accepted == set(self.applied)

    @precondition(lambda self: self.steps)
    @rule(overlap=st.booleans())
    def everybody_gets_on(self, overlap: bool) -> None:
        """From any state, workers that continue to pull and push are never stuck, and no accepted push is lost."""
        overlap = overlap and self.mode.overlaps
        goal = max(self.steps.values()) + 2
        self.finish_folding()
        for _ in range(20 * (goal + 1) * len(self.steps)):
            for life, step in sorted(self.steps.items()):
                if step >= goal:
                    continue
                if life not in self.may_push:
                    self.check_effect(self.state.handle(PullRequested((life, step), *life, step)))
                if overlap and life in self.may_push and life not in self.fetched:
                    self.pull_ahead_of(life)
                if life in (self.may_push & self.fetched.keys() if overlap else self.may_push):
                    self.check_push_once(life)
            if all(step >= goal for step in self.steps.values()):
                break
        backup = getattr(self.mode, "backup_workers", 0)
        behind = [life for life, step in self.steps.items() if step < goal]
        assert len(behind) <= backup, f"stuck: {self.steps}"


TestDrawnHistory = DrawnHistory.TestCase
TestDrawnHistory.settings = settings(max_examples=draws(60), stateful_step_count=40, deadline=None)

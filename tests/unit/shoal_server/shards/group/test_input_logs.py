"""The logs of several copies of one lock group: an answer waits for each complete copy, whichever confirms first."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal import errors
from shoal_server.shards.group import input_log
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.input_logs import InputLogs
from shoal_server.shards.machine import events
from support.run_lengths import draws


class Sender:
    """Takes inputs, and sends nothing. Gradients that are begun wait for `go_on`."""

    def __init__(self) -> None:
        self.gradients = 0
        self.begun: list[Callable[[int], object]] = []
        self.forgotten: list[int] = []

    def gradient(self, payload: Any) -> int:
        return self.next_gradient()

    def begin_gradient(self, payload: Any, sent: Callable[[int], object]) -> Callable[[], object]:
        self.begun.append(sent)
        return partial(self.withdraw, sent)

    def withdraw(self, sent: Callable[[int], object]) -> None:
        if sent in self.begun:
            self.begun.remove(sent)

    def go_on(self) -> None:
        self.begun.pop()(self.next_gradient())

    def next_gradient(self) -> int:
        self.gradients += 1
        return self.gradients

    def add(self, number: int, event: Any, gradient: int) -> None: ...
    def add_hash(self, values_hash: int) -> None: ...
    def forget(self, gradient: int) -> None:
        self.forgotten.append(gradient)

    def flush(self) -> None: ...
    def flush_at_once(self) -> None: ...
    def close(self) -> None: ...
    def ticket(self, ticket: object) -> int:
        return 1


def log(term: int) -> InputLog:
    return InputLog("job", term, f"server-{term}", Sender())


def answered(logs: InputLogs, number: int) -> Callable[[], str]:
    """Asks for an answer. Returns a function that returns what has become of it."""
    outcomes: list[str] = []
    logs.when_copied(number, partial(outcomes.append, "given"), partial(outcomes.append, "refused"))
    return lambda: "".join(outcomes)


class TestALogThatIsCompleteFromTheBeginning:
    """Of a part of a group: its backup has the values when it has split its copy."""

    def test_holds_all_answers_until_the_backup_has_the_values(self) -> None:
        part, logs = log(3), InputLogs("job")
        assert part.begin_complete()
        logs.begin(part)
        told = answered(logs, 0)
        assert (told(), part.complete, part.state) == ("", False, CopyState.COMPLETE)
        part.copied(0)
        assert (told(), part.complete) == ("given", True)
        logs.add(events.FoldsDone())
        told = answered(logs, 1)
        assert told() == ""
        part.copied(1)
        assert told() == "given"
        assert part.settle(1)

    def test_does_not_begin_if_its_connection_has_broken(self) -> None:
        part = log(3)
        part.fail("no network")
        assert not part.begin_complete()
        assert part.state is CopyState.ENDED

    def test_waits_for_a_decision_if_its_connection_breaks(self) -> None:
        part, logs = log(3), InputLogs("job")
        part.begin_complete()
        logs.begin(part)
        told = answered(logs, 0)
        part.fail("no network")
        assert (told(), part.state) == ("", CopyState.BROKEN)
        assert not part.settle(0), "it waits although nobody confirms"
        logs.settle()
        part.end()
        assert told() == "given"


@pytest.fixture
def logs() -> InputLogs:
    """The logs of two complete copies. The second one was begun after an input."""
    found = InputLogs("job")
    first, second = log(1), log(2)
    found.begin(first)
    first.copied(0)
    found.add(events.FoldsDone())
    found.begin(second)
    second.copied(0)
    first.copied(1)
    return found


def test_an_answer_needs_both_copies(logs: InputLogs) -> None:
    first, second = logs
    for early, late, numbers in ((first, second, (2, 1)), (second, first, (2, 3))):
        logs.add(events.FoldsDone())
        outcome = answered(logs, logs.number)
        assert outcome() == ""
        early.copied(numbers[0])
        assert outcome() == ""
        late.copied(numbers[1])
        assert outcome() == "given"


def test_an_answer_goes_on_waiting_for_the_copy_that_is_kept(logs: InputLogs) -> None:
    _, second = logs
    logs.add(events.FoldsDone())
    outcome = answered(logs, logs.number)
    for ended in logs.keep(2):
        ended.end()
    assert outcome() == ""
    assert [*logs] == [second]
    second.copied(1)
    assert outcome() == "given"
    logs.wait(logs.number)


def test_answers_are_refused_when_the_group_closes(logs: InputLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.add(events.FoldsDone())
    outcome = answered(logs, logs.number)
    next(iter(logs)).copied(2)
    logs.close()
    assert outcome() == "refused"
    monkeypatch.setattr(input_log, "COPY_WAIT_S", 0.0)
    with pytest.raises(errors.Moved):
        logs.wait(logs.number)


def test_a_copy_is_complete_when_it_has_the_inputs_that_are_owed() -> None:
    logs, only = InputLogs("job"), log(1)
    logs.begin(only, owed=2)
    only.copied(0)
    assert only.state is CopyState.COMPLETE
    for number in (1, 2):
        assert not only.complete, "the primary believes that its backup has more"
        logs.add(events.FoldsDone())
        only.copied(number)
    assert only.complete


def test_a_push_is_sent_to_each_copy_once(logs: InputLogs) -> None:
    payload: dict[int, Any] = {}
    logs.send_gradient(payload)
    third = log(3)
    logs.begin(third)
    event = events.PushStaged("w", 1, 0, 1.0, 0, payload)
    assert logs.lacks(event)
    logs.send_gradient(payload)
    assert not logs.lacks(event)
    assert [it.sender.gradients for it in logs] == [1, 1, 1]  # type: ignore[attr-defined]
    logs.add(event)
    assert logs.lacks(event), "the same arrays again are another push"


def test_a_push_is_staged_when_each_copy_has_its_gradient(logs: InputLogs) -> None:
    payload: dict[int, Any] = {}
    senders: list[Any] = [it.sender for it in logs]
    sent: list[str] = []
    logs.begin_gradient(payload, partial(sent.append, "sent"))
    for it in senders:
        assert not sent
        assert logs.lacks_gradient(payload)
        it.go_on()
    assert sent == ["sent"]
    assert not logs.lacks_gradient(payload)
    logs.begin_gradient(payload, partial(sent.append, "again"))
    assert sent == ["sent", "again"]


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_is_withdrawn_is_forgotten_by_each_copy_that_has_it(logs: InputLogs, late: bool) -> None:
    payload: dict[int, Any] = {}
    first, second = senders = [it.sender for it in logs]
    given: list[str] = []
    withdraw = logs.begin_gradient(payload, lambda: (given.append("sent"), logs.drop_gradient(payload)))  # type: ignore[func-returns-value]
    first.go_on()  # type: ignore[attr-defined]
    begun = [*second.begun]  # type: ignore[attr-defined]
    withdraw()
    if late:  # it was being sent
        begun[0](second.next_gradient())
    assert [it.forgotten for it in senders] == [[1], [1] if late else []]  # type: ignore[attr-defined]
    assert given == (["sent"] if late else [])


def test_an_answer_that_is_withdrawn_is_not_given(logs: InputLogs) -> None:
    first, second = logs
    logs.add(events.FoldsDone())
    outcomes: list[str] = []
    withdraw = logs.when_copied(logs.number, partial(outcomes.append, "given"), partial(outcomes.append, "refused"))
    first.copied(2)
    assert (first.waiting, second.waiting) == (0, 1)
    withdraw()
    second.copied(1)
    assert not outcomes
    assert (first.waiting, second.waiting) == (0, 0)


class DrawnLogs(RuleBasedStateMachine):
    """Copies that grow, confirm, break and end, and answers that wait."""

    @initialize()
    def start(self) -> None:
        self.logs, self.terms = InputLogs("job"), 0
        self.asked: list[tuple[int, Callable[[], str]]] = []
        self.begun: dict[int, int] = {}  # the group's last input before each copy, by term

    @property
    def all(self) -> list[InputLog]:
        return [*self.logs]

    def drawn(self, data: st.DataObject) -> InputLog:
        return data.draw(st.sampled_from(self.all))

    @rule()
    def add(self) -> None:
        self.logs.add(events.FoldsDone())

    @precondition(lambda self: len(self.all) < 3)
    @rule()
    def begin(self) -> None:
        self.terms += 1
        self.begun[self.terms] = self.logs.number
        self.logs.begin(log(self.terms))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        it = self.drawn(data)
        if it.runs:
            it.copied(data.draw(st.integers(0, it.number)))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.drawn(data).fail("broken")

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        for ended in self.logs.keep(data.draw(st.sampled_from([0, *[it.term for it in self.all]]))):
            ended.end()

    @rule()
    def ask(self) -> None:
        self.asked.append((self.logs.number, answered(self.logs, self.logs.number)))

    def has(self, it: InputLog, number: int) -> bool:
        return it._copied >= number - self.begun[it.term]  # noqa: SLF001 - what the copy has confirmed

    @invariant()
    def answers_are_given_once_and_never_early(self) -> None:
        for number, outcome in getattr(self, "asked", ()):
            waits = [
                it for it in self.all if it.state in (CopyState.COMPLETE, CopyState.BROKEN) and not self.has(it, number)
            ]
            assert outcome() in (("",) if waits and outcome() == "" else ("given",)), outcome()
            if not waits:
                assert outcome() == "given"

    @invariant()
    def a_copy_that_may_be_promoted_has_all_that_was_told(self) -> None:
        for it in getattr(self, "logs", ()):
            if it.complete:
                told = [number for number, outcome in self.asked if outcome() == "given"]
                assert all(self.has(it, number) for number in told)


TestDrawnLogs = DrawnLogs.TestCase
TestDrawnLogs.settings = settings(max_examples=draws(100), stateful_step_count=30, deadline=None)

"""The batches of a session, and its position in them."""

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._session.batches import CLOSE_WAIT_S, DataPosition, NumberedBatches
from shoal._wire import Cursor, DataRange, Lease, NoRange


def batches(answers: list[Lease | NoRange], epochs: int, pushed: Cursor | None = None) -> NumberedBatches:
    spec = shoal.Job(name="job", epochs=epochs)
    return NumberedBatches(4, spec, lambda _: answers.pop(0), lambda: None, pushed, sleep=lambda _: None)


@pytest.mark.parametrize(
    ("epochs", "said"), [(5, "no data left, all 5 epochs are done"), (1, "no data left, its epoch is done")]
)
def test_no_data_from_the_start_is_warned_of(epochs: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert list(batches([NoRange.WAIT, NoRange.FINISHED], epochs)) == []
    (warned,) = caplog.messages
    assert said in warned
    assert "give more epochs (epochs=)" in warned


def test_the_end_of_data_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (numbers,) = batches([Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED], 1)
    assert sorted(numbers) == [*np.arange(4)]
    assert caplog.messages == []


def test_a_second_loop_goes_on_after_the_last_push() -> None:
    def loop(pushed: Cursor | None) -> list[int]:
        return [*np.concatenate([*batches([Lease(7, DataRange(0, 0, 4)), NoRange.FINISHED], 1, pushed)])]

    assert loop(Cursor(7, 3)) == loop(None)[3:]
    assert loop(Cursor(6, 3)) == loop(None), "of another range"
    assert [*batches([Lease(7, DataRange(0, 0, 4)), NoRange.FINISHED], 1, Cursor(7, 4))] == []


def test_batches_may_be_taken_one_by_one() -> None:
    first = batches([Lease(7, DataRange(0, 0, 4)), NoRange.FINISHED], 1)
    next(iter(first))
    assert first.cursor == Cursor(7, 4), "of the batch that the caller has"
    whole = batches([Lease(7, DataRange(0, 0, 4)), NoRange.FINISHED], 1)
    assert len([*whole]) == 1
    assert whole.cursor is None, "after the last batch"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(shoal.Asynchronous(), [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]), (shoal.Synchronous(), [0.05] * 7)],
)
def test_a_session_without_a_range_asks_less_and_less_often_unless_others_wait_for_it(
    mode: shoal.Asynchronous | shoal.Synchronous, expected: list[float]
) -> None:
    answers, slept = [*[NoRange.WAIT] * 7, NoRange.FINISHED], list[float]()
    spec = shoal.Job(name="job", consistency=mode)
    assert [*NumberedBatches(4, spec, lambda _: answers.pop(0), lambda: None, sleep=slept.append)] == []
    assert slept == expected


def refuses(_within_s: float) -> None:
    raise errors.Cancelled("the job has ended")


def test_a_push_counts_as_applied_when_its_step_is_closed() -> None:
    position, waited = DataPosition(joins_gradients=True), list[float]()
    position.await_last(refuses)
    assert position.applied is None
    position.pushed = first = Cursor(1, 4)
    position.passed_barrier()
    position.pushed = last = Cursor(1, 8)
    position.await_last(refuses)
    assert position.applied == first
    position.await_last(waited.append)
    assert position.applied == last
    position.await_last(waited.append)
    assert waited == [CLOSE_WAIT_S], "once"


def test_a_push_of_an_asynchronous_job_is_applied_at_once() -> None:
    position = DataPosition(joins_gradients=False)
    position.pushed = Cursor(1, 4)
    position.await_last(refuses)
    assert position.applied == Cursor(1, 4)

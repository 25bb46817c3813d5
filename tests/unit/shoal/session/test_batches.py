"""The batches of a session whose data is done."""

import numpy as np
import pytest

import shoal
from shoal._session.batches import NumberedBatches
from shoal._wire import DataRange, Lease, NoRange


def batches(answers: list[Lease | NoRange], epochs: int) -> NumberedBatches:
    return NumberedBatches(
        4, shoal.Job(name="job", epochs=epochs), lambda _: answers.pop(0), lambda: None, sleep=lambda _: None
    )


@pytest.mark.parametrize(
    ("epochs", "said"), [(5, "no data left, 5 of 5 epochs are done"), (1, "no data left, 1 of 1 epoch is done")]
)
def test_no_data_from_the_start_is_warned_of(epochs: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert list(batches([NoRange.WAIT, NoRange.FINISHED], epochs)) == []
    (warned,) = caplog.messages
    assert said in warned
    assert "ask for more epochs" in warned


def test_the_end_of_data_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (numbers,) = batches([Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED], 1)
    assert sorted(numbers) == [*np.arange(4)]
    assert caplog.messages == []

"""Consistency modes as users write them: accepted and refused values, and their forms on the wire and as text."""

from typing import Any

import pytest

from shoal import Asynchronous, BoundedStaleness, InvalidJob, Synchronous, consistency

MODES = [
    Synchronous(),
    Synchronous(backup_workers=2**32 - 1),
    Asynchronous(),
    Asynchronous(scale_by_staleness=True),
    BoundedStaleness(0),
    BoundedStaleness(2**53 - 1),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_mode_is_the_same_after_a_journey_and_as_text(mode: consistency.Consistency) -> None:
    assert consistency.from_proto(mode.to_proto()) == mode
    assert consistency.parse(str(mode)) == mode


@pytest.mark.parametrize("value", [-1, 1.5, "4", None, True, 2**53])
def test_a_bound_is_a_whole_number_that_fits_the_wire(value: Any) -> None:
    with pytest.raises(InvalidJob) as raised:
        BoundedStaleness(value)
    assert raised.value.message == (
        f"BoundedStaleness: bound is {value!r}; it must be a whole number from 0 to 9007199254740991; "
        "the limit MAX_STEP is 2^53"
    )
    assert raised.value.details == {"bound": str(value)}


@pytest.mark.parametrize("value", [-1, 0.5, "1", None, False, 2**32])
def test_backup_workers_are_a_whole_number_that_fits_the_wire(value: Any) -> None:
    with pytest.raises(InvalidJob) as raised:
        Synchronous(value)
    assert raised.value.message == (
        f"Synchronous: backup_workers is {value!r}; it must be a whole number from 0 to 4294967295"
    )


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_scaling_is_on_or_off(value: Any) -> None:
    with pytest.raises(InvalidJob, match=r"Asynchronous: scale_by_staleness is .*; it must be True or False"):
        Asynchronous(value)


@pytest.mark.parametrize("text", ["", "fast", "ssp", "ssp:x", "ssp:1.5", "sync:x", "async:1", "ssp:" + "9" * 5_000])
def test_text_that_names_no_mode_is_refused(text: str) -> None:
    with pytest.raises(InvalidJob, match="is not one of sync, sync:BACKUP_WORKERS, async"):
        consistency.parse(text)


@pytest.mark.parametrize("text", ["ssp:99999999999999999999999", "sync:99999999999", "ssp:-1", "sync:-1"])
def test_text_with_a_number_out_of_range_says_the_range(text: str) -> None:
    with pytest.raises(InvalidJob, match="it must be a whole number from 0 to"):
        consistency.parse(text)


def test_backup_workers_leave_one_to_wait_for() -> None:
    Synchronous(1).check(2)
    with pytest.raises(InvalidJob, match="use at most 1"):
        Synchronous(2).check(2)

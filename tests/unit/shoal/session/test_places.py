"""The wait of a session for the place of one that has died."""

import pytest

from shoal import errors
from shoal._session.places import FREE_AFTER, enter_when_free


class Full:
    """A job that is full until a time, and the time."""

    def __init__(self, until: float, **details: object) -> None:
        self.now, self.until, self.details = 100.0, 100.0 + until, details

    def enter(self) -> str:
        if self.now < self.until:
            raise errors.Overloaded("job a is full", **self.details)
        return "entered"

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def entered(self) -> str:
        return enter_when_free(self.enter, sleep=self.sleep, clock=lambda: self.now)


def test_a_session_enters_once_the_place_of_a_dead_one_is_free() -> None:
    assert Full(6.0, **{FREE_AFTER: 5.0}).entered() == "entered"


def test_a_session_does_not_wait_for_places_of_live_ones() -> None:
    full = Full(60.0, workers=2, **{FREE_AFTER: 5.0})
    with pytest.raises(errors.Overloaded, match=r"^job a is full. This session has waited \d s for a place$") as raised:
        full.entered()
    assert raised.value.details["workers"] == "2"
    assert 5.0 < full.now - 100.0 < 10.0


def test_a_session_does_not_wait_for_another_limit() -> None:
    full = Full(60.0)
    with pytest.raises(errors.Overloaded, match=r"^job a is full$"):
        full.entered()
    assert full.now == 100.0

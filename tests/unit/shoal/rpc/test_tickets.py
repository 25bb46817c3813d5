"""Tickets: when a source gets another one, and what it does while there is none to get."""

import pytest

from shoal import errors
from shoal._rpc import TicketSource


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Tickets:
    """Numbered tickets for ten minutes. It records whether the source had a valid one at each request."""

    def __init__(self) -> None:
        self.clock, self.had_one = Clock(), list[bool]()
        self.error: errors.ShoalError | None = None
        self.source = TicketSource(self._fetch, clock=self.clock)

    def _fetch(self, has_one: bool) -> tuple[str, float]:
        self.had_one.append(has_one)
        if self.error:
            raise self.error
        return f"ticket-{len(self.had_one)}", 600.0


def test_a_source_gets_another_ticket_before_half_of_its_time() -> None:
    tickets = Tickets()
    for now, expected in ((0.0, "ticket-1"), (239.0, "ticket-1"), (240.0, "ticket-2"), (240.0, "ticket-2")):
        tickets.clock.now = now
        assert tickets.source() == expected
    assert tickets.had_one == [False, True]


def test_a_source_gets_another_ticket_after_a_refusal() -> None:
    tickets = Tickets()
    assert tickets.source() == "ticket-1"
    tickets.source.credentials.discard_token()
    assert tickets.source() == "ticket-2"
    assert tickets.had_one == [False, False], "the refused ticket does not count"


def test_a_source_uses_its_ticket_until_it_expires_while_there_is_no_other() -> None:
    tickets = Tickets()
    assert tickets.source() == "ticket-1"
    tickets.error = errors.Unreachable("away")
    for tickets.clock.now in (300.0, 599.0):
        assert tickets.source() == "ticket-1"
    tickets.clock.now = 600.0
    with pytest.raises(errors.Unreachable):
        tickets.source()
    tickets.error = None
    assert tickets.source() == f"ticket-{len(tickets.had_one)}"

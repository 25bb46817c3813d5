"""Tickets: when a source gets another one, and what it presents to get it."""

from typing import Any

import pytest

from shoal._rpc import CoordinatorClient, TicketSource
from shoal._security import Credentials
from shoal.v1 import token_pb2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Coordinator(CoordinatorClient):
    """A coordinator that gives numbered tickets for ten minutes, and records the token of each call."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", credentials=Credentials(token=lambda: self.source()))  # noqa: PLW0108 - set later
        self.presented: list[str] = []
        self.source: TicketSource

    def call(self, *_: Any, **__: Any) -> Any:
        self.presented.append(self.credentials.token())
        return token_pb2.GetTicketReply(ticket=f"ticket-{len(self.presented)}", valid_s=600.0)


@pytest.mark.parametrize(("by_certificate", "presented"), [(False, ["first", "ticket-1"]), (True, ["", ""])])
def test_a_trainer_of_a_worker_with_a_certificate_gets_tickets_by_the_certificate(
    by_certificate: bool, presented: list[str]
) -> None:
    """A ticket that is got by a ticket ends with the certificate of the first one, which may be replaced by now."""
    clock, coordinator = Clock(), Coordinator()
    coordinator.source = source = TicketSource(
        coordinator, "job", "worker-0", 1, first="first", by_certificate=by_certificate, clock=clock
    )
    try:
        assert source() == "first"
        clock.now += 10.0
        assert source() == "ticket-1"
        clock.now += 300.0
        assert source() == "ticket-2"
        assert coordinator.presented == presented
    finally:
        coordinator.close()

"""Tickets of one participant of a job, or of a reader: fetched once, and again before they expire."""

import math
import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._security import NO_CREDENTIALS, RENEWED_AFTER, Credentials
from shoal.v1 import token_pb2

# Seconds until a renewal is tried again after the coordinator did not answer.
_AGAIN_S = 10.0

# Returns a new ticket, and the seconds for which it is valid. The ticket is empty if the cluster asks for none. The
# argument says whether the caller has a valid ticket. If so, one attempt is enough: the caller tries again later.
Fetch = Callable[[bool], tuple[str, float]]


def fetch_ticket(
    coordinator: CoordinatorClient, job: str, worker: str, incarnation: int, *, has_one: bool
) -> tuple[str, float]:
    """Requests a ticket from the coordinator, with the current token or certificate of this process.

    Args:
        coordinator: client of the coordinator.
        job: the job.
        worker: the participant's member id; empty for a reader.
        incarnation: the participant's incarnation.
        has_one: as the argument of `Fetch`.

    Returns:
        As `Fetch`.

    Raises:
        ShoalError: the coordinator refuses, or does not answer.
    """
    request = token_pb2.GetTicketRequest(job=job, worker=worker, incarnation=incarnation)
    reply = coordinator.call(coordinator.tokens.GetTicket, request, retry_for_s=0 if has_one else None)
    return reply.ticket, reply.valid_s if reply.ticket else math.inf


class TicketSource:
    """The tickets of one caller, for its calls to servers. Thread-safe; a call returns the ticket to present.

    While the coordinator does not answer, a ticket is used until it expires.

    Args:
        fetch: gets a ticket. It is called by one thread at a time.
        presented: what the caller presents to servers besides its tickets.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, fetch: Fetch, presented: Credentials = NO_CREDENTIALS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetch, self._presented, self._clock = fetch, presented, clock
        self._lock = threading.Lock()  # held while a ticket is fetched, so that it is fetched once
        self._ticket = ""
        self._renew_at = self._expires_at = 0.0

    @classmethod
    def of(cls, coordinator: CoordinatorClient, job: str, worker: str = "", incarnation: int = 0) -> "TicketSource":
        """Returns a source that requests the tickets from the coordinator; see `fetch_ticket`."""
        return cls(
            lambda has_one: fetch_ticket(coordinator, job, worker, incarnation, has_one=has_one),
            coordinator.credentials,
        )

    @property
    def credentials(self) -> Credentials:
        """What the caller presents to servers, with these tickets."""
        return self._presented.with_token(self, self.discard)

    def __call__(self) -> str:
        """Returns a ticket; empty if the cluster asks for none.

        Raises:
            ShoalError: the coordinator refuses, or does not answer and there is no valid ticket.
        """
        with self._lock:
            now = self._clock()
            if now >= self._renew_at:
                self._renew(now)
            return self._ticket

    def discard(self) -> None:
        """Lets the next call get another ticket, because this one was refused."""
        with self._lock:
            self._renew_at = self._expires_at = 0.0

    def _renew(self, now: float) -> None:
        has_one = now < self._expires_at
        try:
            ticket, valid_s = self._fetch(has_one)
        except (errors.Unreachable, errors.DeadlineExceeded):
            if not has_one:
                raise
            self._renew_at = min(now + _AGAIN_S, self._expires_at)
            return
        self._ticket, self._renew_at, self._expires_at = ticket, now + RENEWED_AFTER * valid_s, now + valid_s


__all__ = ["Fetch", "TicketSource", "fetch_ticket"]

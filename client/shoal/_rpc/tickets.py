"""Tickets of one participant of a job, or of a reader: fetched once, and again before they expire."""

import math
import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._security import Credentials
from shoal.v1 import token_pb2

# Seconds until a renewal is tried again after the coordinator did not answer.
_AGAIN_S = 10.0


class TicketSource:
    """The tickets of one caller, for its calls to servers. Thread-safe; a call returns the ticket to present.

    While the coordinator does not answer, a ticket is used until it expires.

    Args:
        coordinator: client of the coordinator.
        job: the job.
        worker: the participant's member id; empty for a reader.
        incarnation: the participant's incarnation.
        first: a ticket that there is already. The source then presents it to get the next one, through `coordinator`.
        by_certificate: whether the source presents only the certificate of its process to get the next ticket. A ticket
            ends with the certificate for which it was made. So if the files of the certificate are replaced, the next
            ticket is valid for longer.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        job: str,
        worker: str = "",
        incarnation: int = 0,
        *,
        first: str = "",
        by_certificate: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator, self._clock = coordinator, clock
        self._request = token_pb2.GetTicketRequest(job=job, worker=worker, incarnation=incarnation)
        # Held during the call, so that it is made once. The call may ask for the ticket that there is.
        self._lock = threading.RLock()
        self._ticket, self._by_certificate, self._renewing = first, by_certificate, False
        self._renew_at = self._expires_at = 0.0
        if first:  # it is new, but its expiry is not known here
            self._renew_at, self._expires_at = clock() + _AGAIN_S, math.inf

    @property
    def credentials(self) -> Credentials:
        """What the caller presents to servers: the credentials of its coordinator's client, with these tickets."""
        return self._coordinator.credentials.with_token(self, self.discard)

    def __call__(self) -> str:
        """Returns a ticket; empty if the cluster asks for none.

        Raises:
            ShoalError: the coordinator refuses, or does not answer and there is no ticket yet.
        """
        with self._lock:
            if self._renewing and self._by_certificate:
                return ""
            now = self._clock()
            if now >= self._renew_at:
                self._renew(now)
            return self._ticket

    def discard(self) -> None:
        """Lets the next call get another ticket, because a server has refused this one."""
        with self._lock:
            self._renew_at = self._expires_at = 0.0

    def _renew(self, now: float) -> None:
        has_one = now < self._expires_at
        self._renew_at, self._renewing = math.inf, True
        try:
            reply = self._coordinator.call(
                self._coordinator.tokens.GetTicket, self._request, retry_for_s=0 if has_one else None
            )
        except (errors.Unreachable, errors.DeadlineExceeded):
            self._renew_at = min(now + _AGAIN_S, self._expires_at) if has_one else 0.0
            if not has_one:
                raise
            return
        except errors.ShoalError:
            self._renew_at = 0.0
            raise
        finally:
            self._renewing = False
        self._ticket = reply.ticket
        valid_s = reply.valid_s if reply.ticket else math.inf
        self._renew_at, self._expires_at = now + valid_s / 2, now + valid_s


__all__ = ["TicketSource"]

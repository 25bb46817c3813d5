"""Tickets of a trainer. The trainer has no token of its own, so it requests each ticket from its daemon, over pipes.

The daemon requests the ticket from the coordinator with the token or the certificate that it has by then. So a trainer
outlives the token with which it was started, if the file of the token is replaced.
"""

import queue
from collections.abc import Callable

from shoal import errors
from shoal._rpc import CALL_TIMEOUT_S, CoordinatorClient, fetch_ticket
from shoal_worker.assignment import AssignedJob
from shoal_worker.messages import TicketReply, TicketWanted


class DaemonTickets:
    """The requests of a trainer, as `TicketSource` makes them.

    Args:
        emit: sends a request to the daemon.
        replies: the replies of the daemon.
        retry_for_s: seconds for which the daemon repeats a call while the coordinator does not answer.
    """

    def __init__(
        self,
        emit: Callable[[TicketWanted], object],
        replies: "queue.SimpleQueue[TicketReply]",
        retry_for_s: float,
    ) -> None:
        # The daemon's last attempt may begin just before the time is over, and it may have a report to handle first.
        self._emit, self._replies, self._patience_s = emit, replies, retry_for_s + 2 * CALL_TIMEOUT_S

    def __call__(self, has_one: bool) -> tuple[str, float]:
        """Returns a ticket, and the seconds for which it is valid.

        Raises:
            Unreachable: the daemon did not answer.
            ShoalError: the coordinator refused the daemon's request, or did not answer it.
        """
        while not self._replies.empty():  # replies that came too late
            self._replies.get_nowait()
        self._emit(TicketWanted(has_one))
        try:
            reply = self._replies.get(timeout=self._patience_s)
        except queue.Empty:
            raise errors.Unreachable(
                f"the daemon of this worker did not answer a request for a ticket within {self._patience_s:g} s"
            ) from None
        if reply.code:
            raise errors.ShoalError.catalogue.get(reply.code, errors.InternalError)(reply.message)
        return reply.ticket, reply.valid_s


def reply_to(wanted: TicketWanted, client: CoordinatorClient, worker: str, assigned: AssignedJob) -> TicketReply:
    """Returns the daemon's reply to the trainer of an assignment.

    Args:
        wanted: the trainer's request.
        client: client of the coordinator, with the credentials of the daemon.
        worker: the daemon's member id.
        assigned: the assignment. The ticket is for its job and its incarnation, whatever the trainer wants.
    """
    try:
        ticket = fetch_ticket(client, assigned.job, worker, assigned.incarnation, has_one=wanted.has_one)
    except errors.ShoalError as error:
        return TicketReply(code=error.code, message=error.message)
    return TicketReply(*ticket)


__all__ = ["DaemonTickets", "reply_to"]

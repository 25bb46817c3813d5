"""Chief link: a worker's end of the two connections that the chief opens, and the listener that accepts them."""

import queue
import socket
from collections.abc import Callable
from typing import Protocol

from shoal import errors
from shoal._limits import catalogue
from shoal._transport import Connection, Listener, ListenerLimits, Security, send_error
from shoal._wire import Buffer
from shoal.v1 import parameter_server_pb2 as pb
from shoal_distribute.coordinator.messages import (
    CALL_FRAMES,
    CallFrame,
    CallOrder,
    LinkHello,
    decode_outcome,
)
from shoal_distribute.coordinator.operation_log import LogPart
from shoal_distribute.coordinator.outcomes import ScheduledOutcome
from shoal_distribute.coordinator.worker_link import HEARTBEAT_INTERVAL_S, SILENT_S

# The chief has two connections; those of its last link may still be closing.
_MAX_CONNECTIONS = 8
_HELLO_S = 5.0

CallReport = tuple[CallFrame, list[Buffer]]


class ChiefLink:
    """One pair of connections with the chief.

    Attributes:
        number: number of the link; a higher one replaces a lower one.
        reports: what to send to the chief, in order; an error or END is the last.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.reports: queue.SimpleQueue[CallReport | errors.ShoalError | None] = queue.SimpleQueue()
        self._connections: list[Connection] = []

    def add(self, connection: Connection) -> None:
        """Adds a connection, which `close` closes."""
        self._connections.append(connection)

    def close(self) -> None:
        """Closes the connections, and ends the thread that sends reports."""
        for connection in self._connections:
            connection.close()
        self.reports.put(None)


class OrdersReceiver(Protocol):
    """What takes the orders of the chief: the calls of a worker. Any thread may call it."""

    def admit(self, hello: LinkHello) -> ChiefLink:
        """Returns the link that a connection belongs to.

        Raises:
            RanksDisagree: it is not for this process.
        """
        ...

    def logged(self, part: LogPart) -> None:
        """Takes a part of the chief's log."""
        ...

    def ordered(self, link: ChiefLink, order: CallOrder) -> None:
        """Takes a call to run."""
        ...

    def learned(self, index: int, outcome: ScheduledOutcome) -> None:
        """Takes the outcome of a call."""
        ...

    def lost(self, link: ChiefLink, *, left: bool) -> None:
        """Handles the end of a link.

        Args:
            link: the link.
            left: whether the chief has said that it leaves.
        """
        ...


class _ChiefHandler:
    """Handler of a connection that the chief has opened."""

    def __init__(self, connection: Connection, receiver: OrdersReceiver) -> None:
        self._connection, self._receiver = connection, receiver

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:  # noqa: ARG002 - it has nothing but its token
        return pb.LaneWelcome()

    def serve(self) -> None:
        kind, payload = self._connection.receive(within_s=_HELLO_S)
        if kind is not CallFrame.LINK:
            raise errors.BadFrame(f"{self._connection.peer} did not say what it connects for")
        hello = LinkHello.decode(payload)
        try:
            link = self._receiver.admit(hello)
        except errors.ShoalError as error:
            send_error(self._connection, error)
            raise
        link.add(self._connection)
        self._connection.send(CallFrame.LINK)
        left = False
        try:
            if hello.reports:
                self._send(link)
            else:
                left = self._receive(link)
        finally:
            link.close()
            self._receiver.lost(link, left=left)

    def close(self) -> None:
        """Frees nothing: the link has the connection."""

    def _receive(self, link: ChiefLink) -> bool:
        """Takes orders. Returns True when the chief leaves."""
        while True:
            kind, payload = self._connection.receive(within_s=SILENT_S)
            if kind is CallFrame.LOG:
                self._receiver.logged(LogPart.decode(payload))
            elif kind is CallFrame.CALL:
                self._receiver.ordered(link, CallOrder.decode(payload))
            elif kind is CallFrame.OUTCOME:
                self._receiver.learned(*decode_outcome(payload))
            elif kind is CallFrame.END:
                return True
            else:
                raise errors.BadFrame(f"{self._connection.peer} sent an unexpected frame")

    def _send(self, link: ChiefLink) -> None:
        """Sends reports until the link is closed, or this worker leaves."""
        while True:
            try:
                report = link.reports.get(timeout=HEARTBEAT_INTERVAL_S)
            except queue.Empty:
                report = (CallFrame.HEARTBEAT, [])
            if report is None:
                return
            if isinstance(report, errors.ShoalError):
                send_error(self._connection, report)
                return
            self._connection.send(*report)
            if report[0] is CallFrame.END:
                return


def listen(listening: socket.socket, receiver: OrdersReceiver, security: Security) -> Callable[[], None]:
    """Accepts the connections of the chief.

    Args:
        listening: a bound socket that listens at the address of this worker.
        receiver: takes the orders.
        security: protects the connections.

    Returns:
        A function that stops listening and closes all connections.
    """
    listener = Listener(
        listening,
        CALL_FRAMES,
        lambda connection: _ChiefHandler(connection, receiver),
        security=security,
        limits=ListenerLimits(catalogue.LANES, catalogue.HOST_LANES, _MAX_CONNECTIONS, _MAX_CONNECTIONS),
        name="chief",
        advice="start one chief",
    )
    listener.start()
    return listener.stop


__all__ = ["CallReport", "ChiefLink", "OrdersReceiver", "listen"]

"""Worker link: the chief's two connections to one worker, and the two threads that use them.

A link is opened again as long as the chief runs, because a worker that has died may be started again.
"""

import threading
import time
from dataclasses import dataclass, field

from shoal import _rpc, errors
from shoal._system.logs import Log
from shoal._transport import Connection, Lane, Security, open_handshake, received_error
from shoal.v1 import parameter_server_pb2 as pb
from shoal_distribute.coordinator.messages import (
    CALL_FRAMES,
    CallFrame,
    CallOrder,
    LinkHello,
    decode_index,
    decode_outcome,
    encode_outcome,
)
from shoal_distribute.coordinator.outcomes import ScheduledOutcome
from shoal_distribute.coordinator.scheduled_calls import ScheduledCalls
from shoal_distribute.threads import start_thread

_log = Log(__name__)

# Seconds between two heartbeats of each end, and of silence after which the other end counts as lost.
HEARTBEAT_INTERVAL_S, SILENT_S = 1.0, 7.0
# Seconds between two attempts to reach a worker, and for one of them.
RETRY_S, _CONNECT_S = 0.3, 5.0
# Seconds before the chief sends one more frame that has nothing but a part of its log.
_LOG_PAUSE_S = 0.05
# Outcomes that one worker waits for at a time.
MAX_ASKED = 1024


@dataclass
class ChiefState:
    """What the threads of a chief share.

    Attributes:
        calls: the calls.
        run: random number of this run of the script, 16 bytes.
        changed: guards what this object and the links have.
        closing: set when the chief leaves.
        failure: why no call can be made any more.
    """

    calls: ScheduledCalls
    run: bytes
    changed: threading.Condition = field(default_factory=threading.Condition)
    closing: threading.Event = field(default_factory=threading.Event)
    failure: errors.ShoalError | None = None


@dataclass(slots=True)
class _Sent:
    """What a worker has got of the log.

    Attributes:
        events: number of events.
        operations, over: see `OperationLog`.
        quiet: whether the last turn sent nothing but a part of the log.
    """

    events: int = 0
    operations: int = -1
    over: bool = False
    quiet: bool = False


class WorkerLink:
    """The connections to one worker. A thread opens them, again and again, until the chief is `closing`.

    Args:
        worker: number of the worker.
        address: its host:port.
        security: protects the connections.
        state: what the links of the chief share.

    Attributes:
        worker: number of the worker.
        connected: whether the worker takes part now.
        left: whether it has said that it leaves.
        lost_at: when the connection ended, or the chief began to look for the worker, by the monotonic clock.
        problem: why it does not take part, as text.
    """

    def __init__(self, worker: int, address: str, security: Security, state: ChiefState) -> None:
        self.worker, self._address, self._security, self._state = worker, address, security, state
        self.connected = self.left = False
        self.lost_at = time.monotonic()
        self.problem = "it has not been reached yet"
        self._numbers = 0  # of links that were opened
        self._asked: list[int] = []  # calls whose outcomes the worker waits for
        self._broken = False
        self._thread = start_thread(self._run, f"worker {worker}")

    def join(self) -> None:
        """Waits until the connections are closed, after the chief is `closing`."""
        self._thread.join()

    def __str__(self) -> str:
        return f"worker {self.worker} ({self._address})"

    def _run(self) -> None:
        while not self._state.closing.is_set():
            try:
                orders, reports = self._connect()
            except errors.ShoalError as error:
                self.problem = error.message
                self._state.closing.wait(RETRY_S)
                continue
            self._serve(orders, reports)

    def _connect(self) -> tuple[Connection, Connection]:
        """Opens both connections."""
        self._numbers += 1
        orders = self._open(reports=False)
        try:
            return orders, self._open(reports=True)
        except BaseException:
            orders.close()
            raise

    def _open(self, *, reports: bool) -> Connection:
        lane = Lane.connect(*_rpc.parse_address(self._address), CALL_FRAMES, timeout_s=_CONNECT_S)
        try:
            open_handshake(lane, self._security, pb.LaneHello(), within_s=_CONNECT_S)
            hello = LinkHello(self._state.run, self.worker, self._numbers, reports)
            lane.send(CallFrame.LINK, [hello.encode()])
            if lane.begin(within_s=_CONNECT_S) is CallFrame.ERROR:
                raise received_error(lane)  # noqa: TRY301 - the lane is closed for each error
            lane.payload()
        except BaseException:
            lane.close()
            raise
        return lane

    def _serve(self, orders: Connection, reports: Connection) -> None:
        """Uses the connections until one of them ends."""
        state = self._state
        with state.changed:
            self.connected, self.left, self._broken, self._asked = True, False, False, []
        receiver = start_thread(lambda: self._receive(orders, reports), f"reports of worker {self.worker}")
        try:
            self._send(orders)
        except errors.ShoalError as error:
            self.problem = error.message
        orders.close()
        reports.close()
        receiver.join()
        with state.changed:
            self.connected, self.lost_at = False, time.monotonic()
            state.calls.lose(self.worker)
            state.changed.notify_all()
        _log.debug(f"{self} has ended", reason="it has left" if self.left else self.problem)

    def _send(self, orders: Connection) -> None:
        """Sends orders, outcomes and the log until the link breaks, or the chief leaves."""
        state, calls = self._state, self._state.calls
        sent = _Sent()
        while True:
            with state.changed:
                state.changed.wait_for(lambda: self._is_due(sent), _LOG_PAUSE_S if sent.quiet else HEARTBEAT_INTERVAL_S)
                if self._broken:
                    return
                attempt = None if state.closing.is_set() else calls.take(self.worker)
                outcomes = self._answers()
                part = calls.log.part(sent.events)
            alone = not attempt and not outcomes  # the part of the log
            if sent.quiet and alone and not state.closing.is_set():
                sent.quiet = False
                continue
            sent.events, sent.operations, sent.over = sent.events + len(part.events), part.operations, part.over
            orders.send(CallFrame.LOG, [part.encode()])
            for index, outcome in outcomes:
                orders.send(CallFrame.OUTCOME, encode_outcome(index, outcome))
            if attempt:
                call = attempt.call
                order = CallOrder(call.index, attempt.number, call.operation, call.name)
                orders.send(CallFrame.CALL, [order.encode()])
            if state.closing.is_set():
                orders.send(CallFrame.END)
                return
            sent.quiet = alone

    def _is_due(self, sent: _Sent) -> bool:
        """Returns whether there is something to send, or nothing more, with the lock."""
        state, log = self._state, self._state.calls.log
        return bool(
            self._broken
            or state.closing.is_set()
            or state.calls.has_call_for(self.worker)
            or any(state.calls.outcome(it) for it in self._asked)
            or (not sent.quiet and (sent.operations, sent.over) != (log.operations, log.over))
        )

    def _answers(self) -> list[tuple[int, ScheduledOutcome]]:
        """Removes the calls that have ended from those that the worker waits for, and returns their outcomes."""
        found = [(index, outcome) for index in self._asked if (outcome := self._state.calls.outcome(index))]
        answered = {index for index, _ in found}
        self._asked = [index for index in self._asked if index not in answered]
        return found

    def _receive(self, orders: Connection, reports: Connection) -> None:
        """Takes the worker's reports until the link breaks."""
        try:
            while not self.left:
                self._take(reports.begin(within_s=SILENT_S), reports)
        except errors.ShoalError as error:
            self.problem = error.message
        with self._state.changed:
            self._broken = True
            self._state.changed.notify_all()
        orders.close()

    def _take(self, kind: object, reports: Connection) -> None:
        """Reads one report."""
        state = self._state
        if kind is CallFrame.ERROR:
            error = received_error(reports)
            with state.changed:
                state.failure = state.failure or error
            raise error
        payload = reports.payload()
        with state.changed:
            if kind is CallFrame.READY:
                state.calls.enter(self.worker)
            elif kind is CallFrame.RESULT:
                attempt, outcome = decode_outcome(payload)
                if not state.calls.finish(self.worker, attempt, outcome):
                    raise errors.BadFrame(f"{self} sent a result of a call that it does not have")
            elif kind is CallFrame.ASK:
                if len(self._asked) >= MAX_ASKED:
                    raise errors.BadFrame(f"{self} waits for more than {MAX_ASKED} outcomes")
                self._asked.append(decode_index(payload))
            elif kind is CallFrame.END:
                self.left = True
            elif kind is not CallFrame.HEARTBEAT:
                raise errors.BadFrame(f"{self} sent an unexpected frame")
            if kind is not CallFrame.HEARTBEAT:
                state.changed.notify_all()


__all__ = ["HEARTBEAT_INTERVAL_S", "MAX_ASKED", "RETRY_S", "SILENT_S", "ChiefState", "WorkerLink"]

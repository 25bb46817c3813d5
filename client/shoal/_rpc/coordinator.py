"""The way to the coordinator that clients, sessions, servers and workers share: one channel, retries, our errors."""

import secrets
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from types import TracebackType
from typing import Any, TypeVar

import structlog

from shoal import _tracing, errors
from shoal._rpc import channels
from shoal._rpc.retries import Retries
from shoal._wire import Cursor
from shoal.status import ServerLoad
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, job_pb2_grpc

T = TypeVar("T")

# A lease that has run out is noticed a little later.
_EXPIRY_SLACK_S, _EXPIRY_POLL_S = 1.0, 0.1
_CALL_TIMEOUT_S = 5.0
_log = structlog.get_logger(__name__)


class CoordinatorClient:
    """Calls to one coordinator.

    Args:
        address: host:port.
        retry_for_s: how long a call is repeated while nobody answers, in seconds.

    Attributes:
        retries: how often that was done; calls to servers on behalf of whoever has this client are counted there too.
    """

    def __init__(self, address: str, *, retry_for_s: float = 20.0) -> None:
        self.address = address
        self.retries = Retries()
        self._retry_for_s = retry_for_s
        self._channel = channels.channel(address)
        self.members = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.jobs = job_pb2_grpc.JobsStub(self._channel)

    def call(
        self,
        method: Callable[..., T],
        request: Any,
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
        retry_for_s: float | None = None,
    ) -> T:
        """Makes one unary call, for example `call(client.jobs.Get, job_pb2.GetRequest(job="a"))`.

        All the coordinator's calls may be repeated: each either names its effect or only reads.

        Raises:
            Unreachable: the coordinator did not answer for `retry_for_s` seconds.
            ShoalError: what the coordinator answered.
        """

        def once() -> T:
            with channels.as_shoal_errors(self.address):
                return method(request, timeout=timeout_s, metadata=_tracing.metadata())

        with _tracing.calling(request):
            return channels.retrying(
                once,
                what="the coordinator",
                address=self.address,
                for_s=self._retry_for_s if retry_for_s is None else retry_for_s,
                on_retry=lambda _: self.retries.count("coordinator"),
            )

    def close(self) -> None:
        """Closes the channel; calls in progress end with Cancelled."""
        self._channel.close()


class MembershipClient:
    """Keeps a process a member of the cluster: registers, beats, and registers anew when it was declared dead.

    Args:
        client: the way to the coordinator; not closed here.
        request: what to register as; `process` and `version` are filled in here.
        on_reply: called with each heartbeat's answer, on the heartbeat's thread.
        on_incarnation: called with each new incarnation, the first included, before the next heartbeat.
        on_end: called when a life is over, by the cluster's word or by `renew`, before the next one begins.
        load: of a server, called for each heartbeat: shards and bytes that it holds, and what it does.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        request: coordinator_pb2.RegisterRequest,
        *,
        on_reply: Callable[[coordinator_pb2.HeartbeatReply], None] = lambda _: None,
        on_incarnation: Callable[[int], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
        load: Callable[[], tuple[int, int, ServerLoad]] | None = None,
    ) -> None:
        self._client = client
        self._request = request
        # Tells this life from every other of the same id; drawn once a life, so that registering may be repeated.
        self._request.process = secrets.token_hex(8)
        self._request.version = version("shoal")
        self._on_reply, self._on_incarnation, self._on_end, self._load = on_reply, on_incarnation, on_end, load
        self._stopped = threading.Event()
        self._beat_now = threading.Event()
        # A new life is wanted; the heartbeat's thread begins it, so that no beat is under way meanwhile.
        self._renewal = threading.Event()
        self._thread: threading.Thread | None = None
        self.incarnation = 0  # 0: between two lives; changed by the heartbeat's thread once that runs
        self._heartbeat_s = 1.0

    @property
    def member(self) -> str:
        """The member id."""
        return self._request.member

    def start(self, *, retry_for_s: float | None = None) -> None:
        """Registers and begins to beat.

        A process that was killed and started again finds its earlier life's lease still running, and waits for its
        end.

        Raises:
            Unreachable: no coordinator answered for `retry_for_s` seconds.
            DuplicateMember: a live process has this id.
            WrongVersion: the coordinator is of another version.
        """
        deadline: float | None = None
        while True:
            try:
                self._register(retry_for_s)
                break
            except errors.DuplicateMember as error:
                left_s = float(error.details.get("retry_in_s", 0))
                deadline = deadline or time.monotonic() + left_s + _EXPIRY_SLACK_S
                if time.monotonic() >= deadline:
                    raise
                _log.info("waiting for the lease of an earlier life", member=self.member, seconds=left_s)
                self._stopped.wait(min(left_s, max(0.0, deadline - time.monotonic())) + _EXPIRY_POLL_S)
        self.heartbeat_now()  # there may be work already
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Becomes a new incarnation, soon: the old one, and all that was assigned to it, is given up."""
        self._renewal.set()
        self.heartbeat_now()

    def heartbeat_now(self) -> None:
        """Sends the next heartbeat at once."""
        self._beat_now.set()

    def stop(self, cursor: Cursor | None = None) -> None:
        """Leaves the cluster and stops beating.

        Args:
            cursor: how far a worker is in the data that it holds. It is worth some tries to say so.
        """
        self._stopped.set()
        self._beat_now.set()
        if self._thread:
            self._thread.join()
        try:
            self._leave(1.0, cursor, retry_for_s=_CALL_TIMEOUT_S if cursor else 0.0)
        except errors.ShoalError as error:  # its lease will run out instead
            _log.debug("could not say goodbye", reason=error.message)

    def __enter__(self) -> "MembershipClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _register(self, retry_for_s: float | None) -> None:
        reply = self._client.call(self._client.members.Register, self._request, retry_for_s=retry_for_s)
        self.incarnation, self._heartbeat_s = reply.incarnation, reply.heartbeat_interval_s
        self._on_incarnation(reply.incarnation)

    def _leave(self, timeout_s: float, cursor: Cursor | None = None, retry_for_s: float = 0.0) -> None:
        request = coordinator_pb2.LeaveRequest(
            member=self.member, incarnation=self.incarnation, cursor=cursor.to_proto() if cursor else None
        )
        self._client.call(self._client.members.Leave, request, timeout_s=timeout_s, retry_for_s=retry_for_s)

    def _beat(self) -> None:
        while not self._stopped.is_set():
            self._beat_now.wait(self._heartbeat_s)
            self._beat_now.clear()
            if self._stopped.is_set():
                return
            try:
                self._take_turn()
            except errors.Fenced as error:
                _log.warning("declared dead, registering anew", reason=error.message)
                self._end_life()
            except errors.ShoalError as error:  # the next turn tries again
                _log.warning("no heartbeat", coordinator=self._client.address, reason=error.message)

    def _take_turn(self) -> None:
        """Does what is next: ends this life if that is wanted, begins another if there is none, beats otherwise."""
        if self._renewal.is_set() and self.incarnation:
            self._leave(_CALL_TIMEOUT_S)
            self._end_life()
        elif self.incarnation:
            self._beat_once()
        else:
            self._register(0)

    def _end_life(self) -> None:
        self.incarnation = 0
        self._renewal.clear()
        self._request.process = secrets.token_hex(8)
        self._on_end()
        self.heartbeat_now()

    def _beat_once(self) -> None:
        request = coordinator_pb2.HeartbeatRequest(member=self.member, incarnation=self.incarnation)
        if self._load:
            request.shards, request.bytes, load = self._load()
            request.load.CopyFrom(load.to_proto())
        timeout_s = max(1.0, 2 * self._heartbeat_s)
        reply = self._client.call(self._client.members.Heartbeat, request, timeout_s=timeout_s, retry_for_s=0)
        self._on_reply(reply)

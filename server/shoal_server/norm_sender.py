"""Norm sender: sends the sums of squares of a step's mean gradient to the other servers of a job, with ShareNorm.

A lock group needs them to close a step (docs/decisions/0063). The calls are repeated until each server has answered.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from shoal import _rpc, errors
from shoal._security import CHECK_EVERY_S, AccessRole
from shoal._wire import shortened, without_controls
from shoal.status import UndeliveredNorm
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_server.calling_server import CallingServer
from shoal_server.shards import JobShardConfig, Peer

_log = structlog.get_logger(__name__)

# Seconds until one call fails.
_TIMEOUT_S = 5.0
# Seconds without a step after which the thread and its channels end. The next step starts others.
IDLE_S = 60.0
# Seconds until another attempt after an unexpected error.
_AGAIN_S = 1.0
# Attempts after which a failure is logged. A step can end here before a peer has created its shards.
_QUIET_ATTEMPTS = 5
# Seconds after which the coordinator is told of a norm that another server has not taken.
REPORT_AFTER_S = 3.0


class NormSender:
    """Sends the squares of one job's steps, on a thread of its own that runs while there are steps.

    It keeps the squares of one step only: when the next one is measured, all servers have the earlier one.

    Args:
        config: the job's configuration.
        identity: returns who this server is; called on the thread.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        config: JobShardConfig,
        identity: Callable[[], CallingServer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._identity, self._clock = config, identity, clock
        self._changed = threading.Condition()  # guards the rest; no other lock is taken under it
        self._next: pb.ShareNormRequest | None = None
        self._since = 0.0  # when `_next` was given
        self._failed: Mapping[str, str] = {}  # by server that has not taken `_next`: why, after an attempt
        self._runs = False  # whether there is a thread that takes the next step
        self._closed = False

    def send(self, step: int, squares: Sequence[float]) -> None:
        """Sends the squares of a step, in the background."""
        request = pb.ShareNormRequest(
            job=self._config.name, generation=self._config.generation, step=step, squares=squares
        )
        with self._changed:
            self._next, self._since, self._failed = request, self._clock(), {}
            if not self._runs and not self._closed:
                self._runs = True
                threading.Thread(target=self._run, name="norms", daemon=True).start()
            self._changed.notify_all()

    def undelivered(self) -> Sequence[UndeliveredNorm]:
        """Returns the squares that other servers have not taken for `REPORT_AFTER_S`, one item for each server."""
        config = self._config
        with self._changed:
            seconds = self._clock() - self._since
            if self._closed or seconds < REPORT_AFTER_S:
                return []
            return [
                UndeliveredNorm(config.name, config.generation, server, seconds, why)
                for server, why in self._failed.items()
            ]

    def close(self) -> None:
        """Ends the thread, at the latest when its running calls end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._send_all():
            self._pause(self._next, _AGAIN_S)

    def _send_all(self) -> bool:
        """Sends steps until the sender is closed or idle. Returns False after an unexpected error."""
        try:
            with _Peers(self._config.peers, self._identity()) as peers:
                while request := self._take():
                    self._deliver(request, peers)
        except Exception as error:
            _log.exception("cannot send the norm of a step; trying again", job=self._config.name)
            why = f"{type(error).__name__}: {error}"
            self._note(self._next, {peer.server: why for peer in self._config.peers})
            return False
        return True

    def _take(self) -> pb.ShareNormRequest | None:
        """Waits for the next step, which stays there until it is delivered.

        Returns:
            The request; None if the thread ends, because the sender is closed or idle.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._next or self._closed, IDLE_S)
            request = None if self._closed else self._next
            self._runs = request is not None
            return request

    def _deliver(self, request: pb.ShareNormRequest, peers: "_Peers") -> None:
        left = self._attempt(request, peers, self._config.peers)
        backoff, attempts = _rpc.Backoff(), 1
        while left and not self._pause(request, backoff.next()):
            attempts += 1
            if attempts == _QUIET_ATTEMPTS:
                for peer, why in left.items():
                    _log.warning(
                        "another server does not take the norm of a step; the step waits",
                        job=request.job,
                        step=request.step,
                        server=peer.server,
                        why=why.message,
                    )
            left = self._attempt(request, peers, left)
        with self._changed:
            if self._next is request:
                self._next = None

    def _attempt(
        self, request: pb.ShareNormRequest, peers: "_Peers", to: Iterable[Peer]
    ) -> Mapping[Peer, errors.ShoalError]:
        """Calls these servers, and returns why calls have failed, by server."""
        failed = peers.call(request, to)
        self._note(request, {peer.server: why.message for peer, why in failed.items()})
        return failed

    def _note(self, request: pb.ShareNormRequest | None, failed: Mapping[str, str]) -> None:
        """Records which servers have not taken a step's squares, and why, unless there is a later step."""
        with self._changed:
            if self._next is request:
                self._failed = {server: shortened(without_controls(why)) for server, why in failed.items()}

    def _pause(self, request: pb.ShareNormRequest | None, for_s: float) -> bool:
        """Waits. Returns whether there is another step than that of a request, or the sender is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._next is not request, for_s)


class _Peers:
    """Channels to the other servers of a job.

    Args:
        peers: the other servers.
        identity: who this server is.
    """

    def __init__(self, peers: Iterable[Peer], identity: CallingServer) -> None:
        self._identity = identity
        presented = identity.credentials
        self._channels = {peer: _rpc.channel(peer.address, presented, AccessRole.SERVER) for peer in peers}
        self._stubs = {peer: ParameterServerStub(channel) for peer, channel in self._channels.items()}
        self._checks = {peer: presented.port_check(peer.address, CHECK_EVERY_S) for peer in self._channels}

    def __enter__(self) -> "_Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels.values():
            channel.close()

    def call(self, request: pb.ShareNormRequest, peers: Iterable[Peer]) -> dict[Peer, errors.ShoalError]:
        """Calls servers in parallel. Returns why calls have failed, by server."""
        request.server, request.incarnation = self._identity.server, self._identity.incarnation
        failed: dict[Peer, errors.ShoalError] = {}
        calls = []
        for peer in peers:
            try:
                metadata = self._identity.credentials.metadata(self._checks[peer])
                calls.append((peer, self._stubs[peer].ShareNorm.future(request, timeout=_TIMEOUT_S, metadata=metadata)))
            except errors.ShoalError as error:  # there is no ticket, or another user would get it
                failed[peer] = error
        for peer, call in calls:
            try:
                with _rpc.as_shoal_errors(peer.address):
                    call.result()
            except errors.ShoalError as error:
                failed[peer] = error
        if any(isinstance(error, errors.Unauthenticated) for error in failed.values()):
            self._identity.credentials.discard_token()
        return failed


__all__ = ["IDLE_S", "NormSender"]

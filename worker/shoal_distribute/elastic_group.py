"""Elastic groups: groups of ranks whose generations the coordinator makes, so that survivors of a failure go on."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from shoal import _rpc, errors
from shoal._security import AccessRole, Credentials
from shoal._system.listeners import loopback_addresses
from shoal._system.waits import wait_notice
from shoal.client import DEFAULT_ADDRESS
from shoal.v1 import group_pb2 as pb
from shoal_distribute.collectives import Group
from shoal_distribute.group_security import group_security
from shoal_distribute.threads import start_thread

# Seconds between two calls that say that this process lives, and between two that ask for the next generation.
_HEARTBEAT_INTERVAL_S, _ASK_S = 1.0, 0.1
# Seconds in which the ranks of a new generation have to connect. Each has just asked for it.
_CONNECT_S = 5.0


class ElasticGroup:
    """The place of this process in an elastic group. One thread at a time calls its methods.

    Args:
        coordinator: host:port of the coordinator; None means that of `SHOAL_COORDINATOR`, or of `shoal up`.
        name: name of the group, the same for all its processes.
        ranks: number of ranks of the first generation, and the largest number of later ones.
        min_ranks: the smallest number of ranks of a later generation.
        environment: the environment variables.

    Raises:
        BadRequest: the address is not host:port.
    """

    def __init__(
        self,
        coordinator: str | None,
        name: str,
        *,
        ranks: int,
        min_ranks: int = 1,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        address = coordinator or environment.get("SHOAL_COORDINATOR") or DEFAULT_ADDRESS
        self._place = _rpc.parse_address(address, "the address of a coordinator")
        credentials = Credentials.find(environment=environment).for_coordinator(address, AccessRole.ADMIN)
        self._client = _rpc.CoordinatorClient(address, credentials=credentials)
        self._environment = environment
        # What both calls say of this process.
        self._own: dict[str, Any] = {
            "group": name,
            "process_id": secrets.token_hex(8),
            "ranks": ranks,
            "min_ranks": min_ranks,
        }
        self._generation = 0
        self._heartbeat: pb.HeartbeatGroupRequest | None = None  # of the current generation
        self._group: Group | None = None  # of the current generation, as soon as it is open
        self._stopped = threading.Event()  # ends the thread of the current generation
        self._thread: threading.Thread | None = None

    def form(self, progress: int, *, within_s: float = 600.0) -> tuple[Group, int]:
        """Waits for the next generation, and connects with its other ranks.

        Args:
            progress: how far this process has trained; -1 if it has nothing that others could use.
            within_s: seconds to wait. After two seconds, a line says what it waits for.

        Returns:
            The group, and the rank whose state all take: the first one with the largest progress.

        Raises:
            BadRequest: the numbers of ranks are not valid, or other processes give others.
            DeadlineExceeded: the generation was not complete in time.
            Forbidden: another user has made the group.
        """
        deadline = time.monotonic() + within_s
        while True:
            listening = self._listen()
            try:
                formed = self._join(_address_of(listening), progress, deadline)
                addresses = [it.address for it in formed.ranks]
                security = group_security(addresses, self._environment)
            except BaseException:
                listening.close()
                raise
            self._generation = formed.generation
            rank = [it.process_id for it in formed.ranks].index(self._own["process_id"])
            self._heartbeat = self._heartbeat_of(addresses[rank], rank, len(addresses))
            self._watch(self._heartbeat)  # before: to connect may take longer than the coordinator waits for a call
            try:
                self._group = Group.open(
                    rank,
                    addresses,
                    security=security,
                    listening=listening,
                    generation=formed.generation,
                    within_s=_CONNECT_S,
                )
            except (errors.RankLost, errors.RanksDisagree) as error:  # a rank has failed in this moment
                self.lose(error)
                continue
            except BaseException:
                self._end_watch()
                raise
            progresses = [it.progress for it in formed.ranks]
            return self._group, progresses.index(max(progresses))

    def lose(self, error: errors.ShoalError) -> None:
        """Tells the coordinator why the generation has ended. `form` waits for the next one.

        Args:
            error: the error that the ranks have got.
        """
        self._end_watch()
        if self._heartbeat and isinstance(error, errors.RankLost):
            self._heartbeat.lost_rank = int(error.details.get("rank", -1))
            self._heartbeat.reason = error.message[:200]
            self._tell(self._heartbeat)
        self._heartbeat = None

    def close(self) -> None:
        """Leaves the group: its next generation does not wait for this process."""
        self._end_watch()
        if self._heartbeat:
            self._heartbeat.leaves = True
            self._tell(self._heartbeat)
            self._heartbeat = None
        self._client.close()

    def _listen(self) -> socket.socket:
        """Returns a socket at the address of this machine from which it reaches the coordinator."""
        host, port = self._place
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing
                own = str(probe.getsockname()[0])
        except OSError as error:
            raise errors.Unreachable(f"cannot reach the coordinator at {host}:{port}: {error}") from None
        return _rpc.listen("127.0.0.1" if loopback_addresses(own) else own, 0)

    def _join(self, address: str, progress: int, deadline: float) -> pb.JoinGroupReply:
        request = pb.JoinGroupRequest(**self._own, address=address, generation=self._generation, progress=progress)
        waits_for, pause = "the coordinator", threading.Event()  # never set
        with wait_notice(f"group {self._own['group']}", lambda: f"for {waits_for}"):
            while (left := deadline - time.monotonic()) > 0:
                reply = self._client.call(self._client.groups.Join, request, retry_for_s=left)
                if reply.generation:
                    return reply
                waits_for = reply.waits_for
                pause.wait(_ASK_S)
        raise errors.DeadlineExceeded(f"group {self._own['group']} still waits for {waits_for}")

    def _heartbeat_of(self, address: str, rank: int, size: int) -> pb.HeartbeatGroupRequest:
        return pb.HeartbeatGroupRequest(
            **self._own, address=address, generation=self._generation, rank=rank, size=size, lost_rank=-1
        )

    def _watch(self, heartbeat: pb.HeartbeatGroupRequest) -> None:
        """Starts the thread that tells the coordinator that this rank lives."""
        stopped, self._group = threading.Event(), None
        self._stopped = stopped

        def run() -> None:
            while not stopped.wait(_HEARTBEAT_INTERVAL_S):
                if self._group:
                    heartbeat.times.CopyFrom(self._group.timings().ranks[heartbeat.rank].to_proto())
                if (ended := self._tell(heartbeat)) and self._group:
                    self._group.fail(
                        errors.RankLost(f"generation {heartbeat.generation} of {heartbeat.group} has ended: {ended}")
                    )

        self._thread = start_thread(run, f"rank {heartbeat.rank} of {heartbeat.group}")

    def _end_watch(self) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _tell(self, heartbeat: pb.HeartbeatGroupRequest) -> str:
        """Sends a heartbeat once. A generation goes on while the coordinator does not answer."""
        with contextlib.suppress(errors.ShoalError):
            call = self._client.groups.Heartbeat
            return self._client.call(call, heartbeat, timeout_s=_HEARTBEAT_INTERVAL_S, retry_for_s=0).ended
        return ""


def _address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


__all__ = ["ElasticGroup"]

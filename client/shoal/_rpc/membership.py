"""Membership of a process in a cluster: registration, heartbeats, and new incarnations."""

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from types import TracebackType
from typing import NoReturn

from shoal import errors
from shoal._rpc.attendance import Attendance
from shoal._rpc.coordinator import CALL_TIMEOUT_S, CoordinatorClient
from shoal._rpc.heartbeat_notices import HeartbeatNotices
from shoal._rpc.heartbeat_pace import HeartbeatPace
from shoal._rpc.tickets import TicketSource
from shoal._security import Authorizer, Credentials
from shoal._system.logs import Log
from shoal._wire import Cursor
from shoal.status import ServerLoad
from shoal.v1 import coordinator_pb2

# Seconds until the coordinator has noticed an expired heartbeat timeout, and between two polls for the expiry.
_EXPIRY_SLACK_S, _EXPIRY_POLL_S = 1.0, 0.1
# Seconds between two registrations while the id is taken: the coordinator may find that the other process is absent.
_ABSENCE_POLL_S = 0.4
_log = Log(__name__)


class MembershipClient:
    """Membership of a process in the cluster: registration and heartbeats.

    If the coordinator declares the process lost, the process registers again as a new incarnation. A heartbeat is sent
    when `pace` says that it is due. As long as reports are answered, no heartbeat is due.

    Args:
        client: client of the coordinator, which stays open.
        request: the registration. `process` and `version` are filled in here.
        on_reply: called with the reply to each heartbeat, on the heartbeat thread.
        on_incarnation: called with each new incarnation, the first included, before the next heartbeat.
        on_end: called when an incarnation ends, by fencing or by `renew`, before the next one starts.
        authorizer: learns the key of the cluster's tokens from each registration, and which of them were revoked from
            registrations and heartbeats. None if this process answers no calls that need a token.
        attends: whether the coordinator learns at once when this process ends (`Attendance`).
        load: called for each heartbeat of a server. It returns the number of shards, their bytes, and the load.

    Attributes:
        tokens_required: whether the cluster asks for tokens; known once this process is registered.
        pace: when heartbeats and reports are due. Code that sends reports for this member uses it, too.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        request: coordinator_pb2.RegisterRequest,
        *,
        on_reply: Callable[[coordinator_pb2.HeartbeatReply], None] = lambda _: None,
        on_incarnation: Callable[[int], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
        authorizer: Authorizer | None = None,
        attends: bool = False,
        load: Callable[[], tuple[int, int, ServerLoad]] | None = None,
    ) -> None:
        self._client = client
        self._request = request
        # Identifies this incarnation. It is drawn once for each, so that registering may be repeated. A process that
        # knows it could repeat the registration, and would get the secret of the member.
        self._request.process = secrets.token_hex(16)
        self._request.version = version("shoal")
        self._on_reply, self._on_incarnation, self._on_end, self._load = on_reply, on_incarnation, on_end, load
        self._authorizer, self.tokens_required = authorizer, False
        self._attendance = Attendance(client, request.member) if attends else None
        self._revoked_revision = 0  # of the revoked tokens that the authorizer knows
        self._stopped = threading.Event()
        self._wake = threading.Event()
        # Requests a new incarnation. The heartbeat thread starts it, so that no heartbeat is in progress then.
        self._renewal = threading.Event()
        self._thread: threading.Thread | None = None
        self.incarnation = 0  # 0 between two incarnations; only the heartbeat thread changes it once it runs
        self.pace = HeartbeatPace()
        self._notices = HeartbeatNotices()  # of the heartbeat thread

    @property
    def member(self) -> str:
        """The member id."""
        return self._request.member

    def credentials_in(self, job: str) -> Credentials:
        """Returns what this process presents to the servers of a job: a ticket for it, if the cluster asks for one."""
        if not self.tokens_required:
            return self._client.credentials
        return TicketSource.of(self._client, job, self.member, self.incarnation).credentials

    def start(self, *, retry_for_s: float | None = None) -> None:
        """Registers and starts the heartbeat thread.

        After a crash and restart of the process, this waits until the heartbeat timeout of the earlier incarnation
        expires. It does not wait if the coordinator knows that the earlier process is absent (`Attendance`).

        Raises:
            Unreachable: the coordinator did not answer for `retry_for_s` seconds.
            DuplicateMember: a live process has this id.
            WrongVersion: the coordinator has another version.
            StartFailed: the coordinator asks for no tokens, and this is a role without --insecure.
        """
        deadline: float | None = None  # none before the first refusal
        while True:
            try:
                self._register(retry_for_s)
                break
            except errors.DuplicateMember as error:
                left_s = float(error.details.get("retry_in_s", 0))
                if deadline is None:
                    deadline = time.monotonic() + left_s + _EXPIRY_SLACK_S
                    _log.info("waiting until an earlier incarnation is lost", member=self.member, at_most_s=left_s)
                if time.monotonic() >= deadline:
                    raise
                until_s = max(0.0, deadline - time.monotonic())
                self._stopped.wait(min(left_s, until_s, _ABSENCE_POLL_S) + _EXPIRY_POLL_S)
        self.heartbeat_now()  # there may be work already
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Requests a new incarnation. The old one leaves the cluster and loses its assignments."""
        self._renewal.set()
        self.heartbeat_now()

    def heartbeat_now(self) -> None:
        """Sends the next heartbeat immediately."""
        self._wake.set()

    def stop(self, cursor: Cursor | None = None) -> None:
        """Stops the heartbeats and leaves the cluster.

        Args:
            cursor: a worker's position in its leased range. With a cursor, the call is repeated if necessary.
        """
        self._stopped.set()
        self._wake.set()
        if self._thread:
            self._thread.join()
        try:
            self._leave(1.0, cursor, retry_for_s=CALL_TIMEOUT_S if cursor else 0.0)
        except errors.ShoalError as error:  # its heartbeat timeout will expire instead
            _log.debug("could not leave the cluster", reason=error.message)
        if self._attendance:
            self._attendance.end()

    def __enter__(self) -> "MembershipClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _register(self, retry_for_s: float | None) -> None:
        reply = self._client.register(self._request, retry_for_s=retry_for_s)
        if self._client.credentials.closed and not reply.token_key:
            self._refuse_open_cluster(reply.incarnation)
        self.tokens_required = bool(reply.token_key)
        if self._authorizer:
            self._authorizer.use_key(reply.token_key, reply.revoked_tokens)
        self._revoked_revision = reply.revoked_revision
        self.incarnation = reply.incarnation
        self.pace.answered(self.pace.now, reply.heartbeat_interval_s)
        self._attend()
        self._on_incarnation(reply.incarnation)

    def _refuse_open_cluster(self, incarnation: int) -> NoReturn:
        """Leaves a cluster that asks for no tokens: all could call this process, though its user did not ask for it."""
        request = coordinator_pb2.LeaveRequest(member=self.member, incarnation=incarnation)
        with suppress(errors.ShoalError):  # its heartbeat timeout will expire instead
            self._client.call(self._client.members.Leave, request, timeout_s=1.0, retry_for_s=0)
        role = coordinator_pb2.Role.Name(self._request.role).lower()
        raise errors.StartFailed(
            f"the coordinator at {self._client.address} asks for no tokens, so the {role} would answer all who can "
            f"reach it. Start the coordinator without --insecure, or give --insecure (SHOAL_INSECURE=1) to the {role}, "
            "too",
            address=self._client.address,
        )

    def _leave(self, timeout_s: float, cursor: Cursor | None = None, retry_for_s: float = 0.0) -> None:
        request = coordinator_pb2.LeaveRequest(
            member=self.member, incarnation=self.incarnation, cursor=cursor.to_proto() if cursor else None
        )
        self._client.call(self._client.members.Leave, request, timeout_s=timeout_s, retry_for_s=retry_for_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            woken = self._wake.wait(self.pace.heartbeat_due_s)
            self._wake.clear()
            if self._stopped.is_set():
                return
            if not woken and self.pace.heartbeat_due_s > 0:  # a report was answered meanwhile
                self._note_answer()
                continue
            try:
                self._run_once()
                self._note_answer()
            except errors.Fenced as error:
                self._note_answer()
                _log.warning("declared lost, registering again", reason=error.message)
                self._end_incarnation()
            except errors.ShoalError as error:  # the next turn tries again
                if self._client.closed:
                    return  # its owner has been told; the heartbeat timeout ends the membership
                self.pace.unanswered()
                self._note_failure(error)

    def _note_failure(self, error: errors.ShoalError) -> None:
        if notice := self._notices.failed(error, self.pace.now):
            since = {"seconds": notice.seconds} if notice.seconds else {}
            _log.warning(notice.text, coordinator=self._client.address, reason=error.message, **since)

    def _attend(self) -> None:
        if self._attendance and self.incarnation:
            self._attendance.keep(self.incarnation)

    def _note_answer(self) -> None:
        self._attend()
        if notice := self._notices.answered(self.pace.now):
            _log.info(notice.text, coordinator=self._client.address, seconds=notice.seconds)

    def _run_once(self) -> None:
        """Ends the incarnation if a new one is requested, registers if there is none, or else sends a heartbeat."""
        if self._renewal.is_set() and self.incarnation:
            self._leave(CALL_TIMEOUT_S)
            self._end_incarnation()
        elif self.incarnation:
            self._send_heartbeat()
        else:
            self._register(0)

    def _end_incarnation(self) -> None:
        if self._attendance:
            self._attendance.end()
        self.incarnation = 0
        self._client.member_secrets.pop(self.member, None)
        self._renewal.clear()
        self._request.process = secrets.token_hex(16)
        self._on_end()
        self.heartbeat_now()

    def _send_heartbeat(self) -> None:
        request = coordinator_pb2.HeartbeatRequest(
            member=self.member, incarnation=self.incarnation, revoked_revision=self._revoked_revision
        )
        if self._load:
            request.shards, request.bytes, load = self._load()
            request.load.CopyFrom(load.to_proto())
        sent_at, timeout_s = self.pace.now, max(1.0, self.pace.interval_s)
        reply = self._client.call(self._client.members.Heartbeat, request, timeout_s=timeout_s, retry_for_s=0)
        self.pace.answered(sent_at, reply.heartbeat_interval_s)
        if reply.revoked_revision != self._revoked_revision:
            if self._authorizer:
                self._authorizer.revoke(reply.revoked_tokens)
            self._revoked_revision = reply.revoked_revision
        self._on_reply(reply)


__all__ = ["MembershipClient"]

"""Attendance of a session: a call that stays open, so that the coordinator learns at once when the process ends."""

from typing import Any

from shoal import errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._system.logs import Log
from shoal.v1 import coordinator_pb2

_log = Log(__name__)


class Attendance:
    """The open call of one member. It is an addition to heartbeats: without it, only the heartbeat timeout tells.

    Args:
        client: client of the coordinator, which stays open.
        member: the member id.
    """

    def __init__(self, client: CoordinatorClient, member: str) -> None:
        self._client, self._member = client, member
        self._call: Any = None  # of the newest incarnation

    def keep(self, incarnation: int) -> None:
        """Opens the call unless it is open, for example because the connection broke. It does not wait."""
        if self._call and not self._call.done():
            return
        request = coordinator_pb2.AttendRequest(member=self._member, incarnation=incarnation)
        try:
            self._call = self._client.open_call(self._client.members.Attend, request)
        except errors.ShoalError as error:  # the next turn tries again
            _log.debug("cannot attend", member=self._member, reason=error.message)

    def end(self) -> None:
        """Ends the call."""
        if self._call:
            self._call.cancel()
        self._call = None


__all__ = ["Attendance"]

"""Waits for a backup: of an answer, until the backup has what it depends on, and of a gradient, until it is sent."""

from collections.abc import Callable

from shoal import errors
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.input_log import COPY_WAIT_S
from shoal_server.shards.group.input_logs import InputLogs
from shoal_server.shards.values import Payload


class _BackupWait(CallWait):
    def __init__(self, logs: InputLogs, waiting: set[CallWait]) -> None:
        super().__init__(waiting, COPY_WAIT_S)
        self._logs = logs
        self._forget: Callable[[], object] = bool

    def _refusal(self) -> errors.ShoalError:
        return self._logs.unconfirmed()

    def _stop(self) -> None:
        self._forget()


class Confirmation(_BackupWait):
    """The wait of an answer, until the backup has all inputs that there are now.

    Args:
        logs: the logs of the group's copies.
        waiting: as for `CallWait`.
    """

    def __init__(self, logs: InputLogs, waiting: set[CallWait]) -> None:
        super().__init__(logs, waiting)
        self._forget = logs.when_copied(logs.number, self._give, self._refuse)

    def _give(self) -> None:
        self._end(None)

    def _refuse(self) -> None:
        self._end(self._refusal())


class SendingGradient(_BackupWait):
    """The wait of a push, until its arrays are sent to the backup. Then the push can be staged.

    Args:
        logs: the logs of the group's copies.
        payload: the arrays of the push. They do not change before the end of the wait.
        waiting: as for `CallWait`.
    """

    def __init__(self, logs: InputLogs, payload: Payload, waiting: set[CallWait]) -> None:
        super().__init__(logs, waiting)
        self._payload = payload
        self._forget = logs.begin_gradient(payload, self._sent)

    def _sent(self) -> None:
        if not self._end(None):
            self._logs.drop_gradient(self._payload)


__all__ = ["Confirmation", "SendingGradient"]

"""Waits for a backup: of an answer, until the backup has what it depends on, and of a gradient, until it is sent."""

from collections.abc import Callable

from shoal import errors
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.input_log import COPY_WAIT_S, InputLog
from shoal_server.shards.values import Payload


class _BackupWait(CallWait):
    def __init__(self, log: InputLog, waiting: set[CallWait]) -> None:
        super().__init__(waiting, COPY_WAIT_S)
        self._log = log
        self._forget: Callable[[], object] = bool

    def _refusal(self) -> errors.ShoalError:
        return self._log.unconfirmed()

    def _stop(self) -> None:
        self._forget()


class Confirmation(_BackupWait):
    """The wait of an answer, until the backup has all inputs that there are now.

    Args:
        log: the log of the backup.
        waiting: as for `CallWait`.
    """

    def __init__(self, log: InputLog, waiting: set[CallWait]) -> None:
        super().__init__(log, waiting)
        self._forget = log.when_copied(log.number, self._give, self._refuse)

    def _give(self) -> None:
        self._end(None)

    def _refuse(self) -> None:
        self._end(self._refusal())


class SendingGradient(_BackupWait):
    """The wait of a push, until its arrays are sent to the backup. Then the push can be staged.

    Args:
        log: the log of the backup.
        payload: the arrays of the push. They do not change before the end of the wait.
        waiting: as for `CallWait`.
    """

    def __init__(self, log: InputLog, payload: Payload, waiting: set[CallWait]) -> None:
        super().__init__(log, waiting)
        self._payload = payload
        self._forget = log.begin_gradient(payload, self._sent)

    def _sent(self) -> None:
        if not self._end(None):
            self._log.drop_gradient(self._payload)


__all__ = ["Confirmation", "SendingGradient"]

"""Late sender: the thread that sends to a backup what would make another thread wait.

While the backup does not read, calls of the lock group wait without a thread, and this one thread waits for the socket.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shoal_server.shards import Payload


@dataclass(frozen=True, slots=True, eq=False)
class _LateGradient:
    payload: Payload
    sent: Callable[[int], object]


class LateSender:
    """What waits to be sent to one backup, and the thread that sends it.

    Args:
        send_gradient: sends arrays, and returns their number; 0 if the connection is broken. It may wait.
        send_inputs: sends the inputs that were added. It may wait.
        on_failure: closes the connection after an unexpected error.
    """

    def __init__(
        self,
        send_gradient: Callable[[Payload], int],
        send_inputs: Callable[[], object],
        on_failure: Callable[[Exception], object],
    ) -> None:
        self._send_gradient, self._send_inputs, self._on_failure = send_gradient, send_inputs, on_failure
        self._wanted = threading.Event()
        self._closed = False
        self._gradients: deque[_LateGradient] = deque()  # single operations of a deque are atomic

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="copy-inputs", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether gradients wait."""
        return bool(self._gradients)

    def flush(self) -> None:
        """Sends the inputs that were added."""
        self._wanted.set()

    def add(self, payload: Payload, sent: Callable[[int], object]) -> Callable[[], object]:
        """Sends arrays.

        Args:
            payload: the arrays.
            sent: called with their number when they are sent, or with 0 if the connection is broken.

        Returns:
            A function that withdraws the arrays, if they are not being sent.
        """
        gradient = _LateGradient(payload, sent)
        self._gradients.append(gradient)
        self._wanted.set()
        if self._closed:
            self._refuse()
        return partial(self._withdraw, gradient)

    def close(self) -> None:
        """Ends the thread, when the connection is closed. May be called twice, and on any thread."""
        self._closed = True
        self._wanted.set()
        self._refuse()

    def _withdraw(self, gradient: _LateGradient) -> None:
        with suppress(ValueError):
            self._gradients.remove(gradient)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wanted.wait()
                self._wanted.clear()
                self._send_inputs()
                while gradient := self._next():
                    self._send(gradient)
                    self._send_inputs()
        except Exception as error:
            self._on_failure(error)

    def _send(self, gradient: _LateGradient) -> None:
        number = 0
        try:
            number = self._send_gradient(gradient.payload)
        except Exception as error:
            self._on_failure(error)
        gradient.sent(number)

    def _refuse(self) -> None:
        while gradient := self._next():
            gradient.sent(0)

    def _next(self) -> _LateGradient | None:
        with suppress(IndexError):
            return self._gradients.popleft()
        return None


__all__ = ["LateSender"]

"""Links between the stages of several processes: activations and their gradients, over the connections of the ranks."""

import json
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_distribute.collectives import Group
from shoal_distribute.pipeline.links import Message, Passed
from shoal_worker.arrays import on_host


class RankLinks:
    """Links of the stage of this process. A sender does not wait for the receiver: the schedule limits what is sent.

    Args:
        line: the ranks of the stages of one replica, in order.
    """

    def __init__(self, line: Group) -> None:
        self._line = line

    def send(self, sender: int, receiver: int, message: Message) -> None:
        """Sends a message to another stage. See `StageLinks.send`.

        Args:
            sender, receiver, message: see `StageLinks.send`.
        """
        del sender  # this process
        said, arrays = encoded(message)
        self._line.pass_soon(receiver, said, arrays)

    def receive(self, sender: int, receiver: int) -> Message:
        """Waits for the next message of another stage. See `StageLinks.receive`.

        Args:
            sender, receiver: see `StageLinks.receive`.
        """
        del receiver  # this process
        return decoded(*self._line.passed(sender, memory_of))

    def stop(self) -> None:
        """Does nothing: the group of the ranks ends when a stage fails."""


def encoded(message: Message) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    """Returns what a message says of its values, and their arrays on the host.

    Each value is null, or [shape, dtype, whether its gradient is needed]; the last one is null for a gradient.
    """
    said: list[Any] = []
    arrays: list[np.ndarray[Any, Any]] = []
    for value in message:
        if value is None:
            said.append(None)
            continue
        array = np.asarray(on_host(value.array if isinstance(value, Passed) else value), order="C")
        needs = value.needs_gradient if isinstance(value, Passed) else None
        said.append([array.shape, array.dtype.name, needs])
        arrays.append(array)
    return json.dumps(said).encode(), arrays


def memory_of(said: bytes) -> list[np.ndarray[Any, Any]]:
    """Returns memory for the arrays of a message."""
    return [np.empty(it[0], np.dtype(it[1])) for it in json.loads(said) if it is not None]


def decoded(said: bytes, arrays: Any) -> Message:
    """Returns a message.

    Args:
        said: what `encoded` says of it.
        arrays: its arrays.
    """
    rest = iter(arrays)
    found: list[Any] = []
    for value in json.loads(said):
        array: Array | None = None if value is None else next(rest)
        found.append(array if value is None or value[2] is None else Passed(array, value[2]))
    return found


__all__ = ["RankLinks", "decoded", "encoded", "memory_of"]

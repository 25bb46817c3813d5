"""Links between stages, and those of one process: bounded queues of activations and their gradients.

`send` and `receive` make spans of the messages, if tracing is on.
"""

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Protocol

from shoal import _tracing
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice


@dataclass(frozen=True)
class Passed:
    """One value that a stage passes to the next.

    Attributes:
        array: the value.
        needs_gradient: whether the sender waits for its gradient.
    """

    array: Array
    needs_gradient: bool


# What stages pass: values forward, and gradients back, which are None for values that need none.
Message = list[Passed] | list[Array | None]


class Stopped(Exception):
    """Another stage has failed, so this one stops."""


class StageLinks(Protocol):
    """What carries messages between the stages of a pipeline, in the order in which they are sent."""

    def send(self, sender: int, receiver: int, message: Message) -> None:
        """Puts a message on a link.

        Args:
            sender: number of the sending stage.
            receiver: number of the receiving stage.
            message: the message. Its arrays must be computed, and must not change any more.
        """

    def receive(self, sender: int, receiver: int) -> Message:
        """Takes the next message from a link.

        Args:
            sender: number of the sending stage.
            receiver: number of the receiving stage.
        """

    def stop(self) -> None:
        """Ends all waiting: a stage has failed."""


class Links:
    """The `StageLinks` of one process: queues between its threads, of which each has a stage.

    Args:
        capacity: messages that a link holds. A sender waits while it is full.
    """

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._condition = threading.Condition()  # guards what follows
        self._queues: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._is_stopped = False

    def send(self, sender: int, receiver: int, message: Message) -> None:
        """Puts a message on a link.

        Args:
            sender, receiver, message: see `StageLinks.send`.

        Raises:
            Stopped: another stage has failed.
        """
        with self._condition:
            queue = self._queues[sender, receiver]
            self._condition.wait_for(lambda: self._is_stopped or len(queue) < self._capacity)
            self._check()
            queue.append(message)
            self._condition.notify_all()

    def receive(self, sender: int, receiver: int) -> Message:
        """Takes the next message from a link.

        Args:
            sender, receiver: see `StageLinks.receive`.

        Raises:
            Stopped: another stage has failed.
        """
        with self._condition:
            queue = self._queues[sender, receiver]
            self._condition.wait_for(lambda: self._is_stopped or bool(queue))
            self._check()
            message = queue.popleft()
            self._condition.notify_all()
            return message

    def stop(self) -> None:
        """Ends all waiting: a stage has failed."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()

    def _check(self) -> None:
        if self._is_stopped:
            raise Stopped


def send(links: StageLinks, sender: int, receiver: int, message: Message, what: str, micro_batch: int = -1) -> None:
    """Puts a message on a link, in a span.

    Args:
        links, sender, receiver, message: see `StageLinks.send`.
        what: what the message has, for the span.
        micro_batch: number of the micro-batch; -1 for a message of the whole batch.
    """
    with _span("send", sender, receiver, sender, what, micro_batch) as span:
        if span is not _tracing.NOTHING:
            span.set_attributes(bytes=_bytes_of(message))
        links.send(sender, receiver, message)


def receive(links: StageLinks, sender: int, receiver: int, what: str, micro_batch: int = -1) -> Message:
    """Takes the next message from a link, in a span that includes the wait for it.

    Args:
        links, sender, receiver: see `StageLinks.receive`.
        what, micro_batch: see `send`.

    Returns:
        The message.
    """
    with _span("receive", sender, receiver, receiver, what, micro_batch) as span:
        message = links.receive(sender, receiver)
        if span is not _tracing.NOTHING:
            span.set_attributes(bytes=_bytes_of(message))
        return message


def _span(verb: str, sender: int, receiver: int, stage: int, what: str, micro_batch: int) -> _tracing.Span:
    return _tracing.span(
        f"{verb} {what}",
        stage=stage,
        sender=sender,
        receiver=receiver,
        direction="forward" if sender < receiver else "backward",
        micro_batch=micro_batch,
    )


def _bytes_of(message: Message) -> int:
    arrays = (it.array if isinstance(it, Passed) else it for it in message)
    return sum(int(it.nbytes) for it in arrays if it is not None)


def settle(device: LogicalDevice) -> None:
    """Waits until a GPU has computed what this thread has started, so that other threads may use it."""
    if device.is_gpu:
        device.xp.cuda.get_current_stream().synchronize()


__all__ = ["Links", "Message", "Passed", "StageLinks", "Stopped", "receive", "send", "settle"]

"""Norm exchange: the sums of squares of a synchronous step's mean gradient, from each server of a job.

Each server scales its part of the mean by the norm of the whole mean (docs/decisions/0063). This module is pure.
"""

import math
from collections.abc import Collection, Sequence
from typing import Protocol

from shoal import errors
from shoal.status import UndeliveredNorm
from shoal.v1 import replica_pb2 as pb
from shoal_server.optimizers import norms
from shoal_server.shards.machine.events import NormMeasured, NormReceived


class NormOutbox(Protocol):
    """What sends the squares of steps to the other servers of a job. These methods return at once."""

    def send(self, step: int, squares: Sequence[float]) -> None:
        """Sends the squares of a step to each of the other servers, until it has them. A later call ends an earlier."""

    def undelivered(self) -> Sequence[UndeliveredNorm]:
        """Returns the squares that other servers have not taken for some seconds, one item for each server."""
        ...

    def close(self) -> None:
        """Ends all calls."""


def check_squares(squares: Sequence[float], whose: str) -> None:
    """Checks sums of squares that another process has sent. They may be infinite: squares of float64 overflow.

    Args:
        squares: the sums.
        whose: what they are, for the message.

    Raises:
        BadRequest: a sum is negative or NaN.
    """
    for square in squares:
        if not 0 <= square <= math.inf:
            raise errors.BadRequest(f"{whose} has a sum of squares {square}; it must be at least 0, and not NaN")


def pushed_squares(job: str, squares: float | None) -> float:
    """Returns the sum of the squares of a push that only its worker knows as a whole.

    Args:
        job: name of the job.
        squares: the sum in the header of the push.

    Raises:
        BadRequest: it is missing, negative or NaN.
    """
    if squares is None:
        raise errors.BadRequest(
            f"{job} has a clip_norm and is on several servers, so the header of a push needs `squares`, the sum of the "
            "squares of all its gradients"
        )
    check_squares([squares], f"{job}: a push")
    return squares


class NormExchange:
    """The squares of the open step that have arrived, by server.

    A gradient is committed only after all servers have staged it, and a server stages it only while its step is open
    there, or was open before. So a server never measures a step that another server has not opened yet, and a server
    keeps the squares of one step only.

    Args:
        name: name of the group, for messages.
        peers: member ids of the other servers of the job.
    """

    def __init__(self, name: str, peers: Collection[str]) -> None:
        self._name, self._peers = name, frozenset(peers)
        self._step = 0
        self._own: Sequence[float] | None = None
        self._others: dict[str, Sequence[float]] = {}

    def add(self, event: NormMeasured | NormReceived, step: int) -> float | None:
        """Adds squares. Those of a closed step, and repeated ones, have no effect.

        Args:
            event: the squares of this server or of another one.
            step: the open step.

        Returns:
            The sum of all squares of the open step; None if some are missing.

        Raises:
            BadRequest: the server is not one of the job, or its step is not open yet.
        """
        if isinstance(event, NormReceived):
            self._check(event, step)
        if step != self._step:
            self._step, self._own, self._others = step, None, {}
        if isinstance(event, NormMeasured):
            self._own = event.squares
        elif event.step == step:
            self._others.setdefault(event.server, event.squares)
        if self._own is None or self._others.keys() != self._peers:
            return None
        return norms.total([*self._own, *(square for squares in self._others.values() for square in squares)])

    def write_to(self, message: pb.GroupState, step: int) -> None:
        """Writes the norms of the open step into a message, at a moment at which this server has not measured its own.

        Args:
            message: the message.
            step: the open step.
        """
        if step == self._step:
            for server, squares in self._others.items():
                message.norms.add(server=server, step=step, squares=squares)

    def restore(self, message: pb.GroupState, step: int) -> None:
        """Restores the norms that another object has written.

        Args:
            message: the message.
            step: the open step.

        Raises:
            BadRequest: a sum of squares is not valid.
        """
        for norm in message.norms:
            check_squares(norm.squares, "a replica")
        self._step, self._own = step, None
        self._others = {norm.server: tuple(norm.squares) for norm in message.norms}

    def _check(self, event: NormReceived, step: int) -> None:
        if event.server not in self._peers:
            raise errors.BadRequest(f"{self._name}: {event.server!r} is not another server of the job")
        if event.step > step:
            raise errors.BadRequest(
                f"{self._name}: {event.server} shares the norm of step {event.step}, but the open step is {step}"
            )


__all__ = ["NormExchange", "NormOutbox", "check_squares", "pushed_squares"]

"""Ring collectives over connections, for large arrays. Each rank sends the smallest possible number of bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.members import Members
from shoal_distribute.collectives.mesh import FRAME_BYTES, frames_of
from shoal_distribute.collectives.schedule import Part, RingRound


def run_ring(
    members: Members, flat: np.ndarray[Any, Any], parts: Sequence[Part], rounds: Iterable[RingRound], op: ReduceOp
) -> None:
    """Runs the rounds of a ring on an array, in place.

    A frame is sent as soon as it has been received and added, so a round begins before the one before has ended.

    Args:
        members: the ranks of the ring.
        flat: the array, of one dimension.
        parts: the part of each member.
        rounds: what this rank does in each round.
        op: how contributions are joined. The rank that adds the last one divides, by the number of ranks of the group.
    """
    mesh, following, previous = members.mesh, members.neighbour(1), members.neighbour(-1)
    planned = list(rounds)
    scratch = np.empty(min(FRAME_BYTES // flat.itemsize, flat.size), flat.dtype)
    if planned:
        for frame in frames_of(flat, parts[planned[0].sends]):
            mesh.send_soon(following, frame)
    for number, each in enumerate(planned):
        mesh.rounds += 1
        last = number + 1 == len(planned)
        complete = last or not planned[number + 1].reduces  # what is added now is the sum of all members
        for place, frame in enumerate(frames_of(flat, parts[each.receives])):
            counted = place == 0  # each round brings the first data of one more rank
            if each.reduces:
                received = scratch[: frame.size]
                mesh.receive(previous, received, waits=counted)
                np.add(received, frame, out=frame)
                if complete:
                    op.finish(frame, mesh.ranks)
            else:
                mesh.receive(previous, frame, waits=counted and planned[0] is each)
            if not last:
                mesh.send_soon(following, frame)
    mesh.flush()


__all__ = ["run_ring"]

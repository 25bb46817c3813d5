"""Tree collectives over connections, for small arrays, whose time depends on the number of messages in sequence.

A large array takes a chain of ranks instead: the narrowest tree, in which each rank sends the array once.
"""

from typing import Any

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.mesh import Mesh, frames_of
from shoal_distribute.collectives.schedule import tree

# A larger array takes a ring or a chain, which send fewer bytes. So much fits in the buffers of a socket.
SMALL_BYTES = 32 << 10


def reduce_to_root(mesh: Mesh, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
    """Adds the arrays of all ranks into that of rank 0, in an order that depends only on the number of ranks.

    Args:
        mesh: the connections.
        flat: this rank's array, of one dimension; a partial sum afterwards.
        op: how contributions are joined.
    """
    node = tree(mesh.rank, mesh.ranks)
    received = np.empty_like(flat)
    for child in node.children:
        mesh.rounds += 1
        mesh.receive(child, received, waits=True)
        np.add(flat, received, out=flat)
    if node.parent is not None:
        mesh.send(node.parent, flat)
    else:
        op.finish(flat, mesh.ranks)


def send_from_root(mesh: Mesh, flat: np.ndarray[Any, Any], root: int = 0) -> None:
    """Gives the array of one rank to all others.

    Args:
        mesh: the connections.
        flat: the array of one dimension; it is filled at all other ranks.
        root: the rank that has it.
    """
    if flat.nbytes > SMALL_BYTES:
        _pass_on(mesh, flat, root)
        return
    node = tree(mesh.rank, mesh.ranks, root)
    if node.parent is not None:
        mesh.rounds += 1
        mesh.receive(node.parent, flat, waits=True)
    for child in reversed(node.children):  # the largest subtree first, because it takes longest
        mesh.send(child, flat)


def _pass_on(mesh: Mesh, flat: np.ndarray[Any, Any], root: int) -> None:
    """Gives a large array to all ranks, each of which passes on a frame while it receives the next one."""
    following, previous = (mesh.rank + 1) % mesh.ranks, (mesh.rank - 1) % mesh.ranks
    mesh.rounds += mesh.rank != root
    for place, frame in enumerate(frames_of(flat)):
        if mesh.rank != root:
            mesh.receive(previous, frame, waits=place == 0)
        if following != root:
            mesh.send_soon(following, frame)
    mesh.flush()


__all__ = ["SMALL_BYTES", "reduce_to_root", "send_from_root"]

"""Tree collectives over connections, for small arrays, whose time depends on the number of messages in sequence."""

from typing import Any

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.mesh import Mesh
from shoal_distribute.collectives.schedule import tree

# A larger array takes a ring, which sends fewer bytes. So much fits in the buffers of a socket.
SMALL_BYTES = 32 << 10


def reduce_to_root(mesh: Mesh, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
    """Adds the arrays of all ranks into that of rank 0, in an order that depends on nothing else.

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
    node = tree(mesh.rank, mesh.ranks, root)
    if node.parent is not None:
        mesh.rounds += 1
        mesh.receive(node.parent, flat, waits=True)
    for child in reversed(node.children):  # the largest subtree first, because it takes longest
        mesh.send(child, flat)


__all__ = ["SMALL_BYTES", "reduce_to_root", "send_from_root"]

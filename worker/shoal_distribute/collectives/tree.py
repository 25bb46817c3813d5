"""Tree collectives over connections, for small arrays, whose time depends on the number of messages in sequence.

A large array takes a chain of ranks instead: the narrowest tree, in which each rank sends the array once.
"""

from typing import Any

import numpy as np

from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.members import Members
from shoal_distribute.collectives.mesh import frames_of
from shoal_distribute.collectives.schedule import tree

# A larger array takes a ring or a chain, which send fewer bytes. So much fits in the buffers of a socket.
SMALL_BYTES = 32 << 10


def reduce_to_root(members: Members, flat: np.ndarray[Any, Any], op: ReduceOp) -> None:
    """Adds the arrays of all members into that of the first, in an order that depends only on their number.

    Args:
        members: the ranks of the tree.
        flat: this rank's array, of one dimension; a partial sum afterwards.
        op: how contributions are joined. The first member divides, by the number of ranks of the group.
    """
    mesh, node = members.mesh, tree(members.place, len(members))
    received = np.empty_like(flat)
    for child in node.children:
        mesh.rounds += 1
        mesh.receive(members.ranks[child], received, waits=True)
        np.add(flat, received, out=flat)
    if node.parent is not None:
        mesh.send(members.ranks[node.parent], flat)
    else:
        op.finish(flat, mesh.ranks)


def send_from_root(members: Members, flat: np.ndarray[Any, Any], root: int = 0) -> None:
    """Gives the array of one member to all others.

    Args:
        members: the ranks of the tree.
        flat: the array of one dimension; it is filled at all other ranks.
        root: the place of the member that has it.
    """
    if flat.nbytes > SMALL_BYTES:
        _pass_on(members, flat, root)
        return
    mesh, node = members.mesh, tree(members.place, len(members), root)
    if node.parent is not None:
        mesh.rounds += 1
        mesh.receive(members.ranks[node.parent], flat, waits=True)
    for child in reversed(node.children):  # the largest subtree first, because it takes longest
        mesh.send(members.ranks[child], flat)


def _pass_on(members: Members, flat: np.ndarray[Any, Any], root: int) -> None:
    """Gives a large array to all members, each of which passes on a frame while it receives the next one."""
    mesh, following, previous = members.mesh, members.neighbour(1), members.neighbour(-1)
    source = members.ranks[root]
    mesh.rounds += mesh.rank != source
    for place, frame in enumerate(frames_of(flat, [slice(0, flat.size)])):
        if mesh.rank != source:
            mesh.receive(previous, frame, waits=place == 0)
        if following != source:
            mesh.send_soon(following, frame)
    mesh.flush()


__all__ = ["SMALL_BYTES", "reduce_to_root", "send_from_root"]

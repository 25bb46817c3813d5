"""Members: the ranks of a mesh that take part in a ring, in a tree, in the shared memory of a host or in a subgroup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.collectives.calls import CollectiveCall, layout_of
from shoal_distribute.collectives.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Members:
    """Some ranks of a mesh, of which this rank is one.

    Attributes:
        mesh: the connections of this rank.
        ranks: the members, in order. A *place* is an index in them.
    """

    mesh: Mesh
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        """The place of this rank."""
        return self.ranks.index(self.mesh.rank)

    def neighbour(self, steps: int) -> int:
        """Returns the rank so many steps further on the ring of the members."""
        return self.ranks[(self.place + steps) % len(self.ranks)]


class SubgroupMesh(Mesh):
    """The connections between some ranks of a mesh, whose places are the ranks of a subgroup.

    A failure ends the whole mesh. Errors name the ranks of the mesh.

    Args:
        members: the ranks.
    """

    def __init__(self, members: Members) -> None:
        self._whole, self._members = members.mesh, members.ranks
        self.rank, self.ranks = members.place, len(members)
        self.sent_bytes = self.rounds = 0
        self.times = self._whole.times

    def agree(self, call: CollectiveCall, among: Sequence[int] = ()) -> None:
        chosen = [self._members[place] for place in among] if among else self._members
        # Calls of other subgroups, and of the whole group, are other calls.
        self._whole.agree(replace(call, layout=layout_of((self._members, call.layout))), chosen)

    def send(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        self.sent_bytes += array.nbytes
        self._whole.send(self._members[rank], array)

    def send_soon(self, rank: int, array: np.ndarray[Any, Any]) -> None:
        self.sent_bytes += array.nbytes
        self._whole.send_soon(self._members[rank], array)

    def tell_soon(self, rank: int, said: bytes) -> None:
        self._whole.tell_soon(self._members[rank], said)

    def flush(self, among: Sequence[int] = ()) -> None:
        # What other subgroups send may wait for a rank that waits for this one.
        self._whole.flush([self._members[place] for place in among] if among else self._members)

    def hear(self, rank: int) -> bytes:
        return self._whole.hear(self._members[rank])

    def receive(self, rank: int, array: np.ndarray[Any, Any], *, waits: bool = False) -> None:
        self._whole.receive(self._members[rank], array, waits=waits)

    def name_ranks(self, names: Mapping[int, str]) -> None:
        self._whole.name_ranks({self._members[place]: name for place, name in names.items()})

    def check(self) -> None:
        self._whole.check()

    def has_left(self, rank: int) -> bool:
        return self._whole.has_left(self._members[rank])

    def lost(self, rank: int, reason: str) -> errors.ShoalError:
        return self._whole.lost(self._members[rank], reason)

    def fail(self, error: errors.ShoalError) -> None:
        self._whole.fail(error)

    def close(self) -> None:
        """Closes nothing: the mesh has the connections."""


__all__ = ["Members", "SubgroupMesh"]

"""Members: the ranks of a mesh that take part in a ring, in a tree or in the shared memory of a host."""

from dataclasses import dataclass

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


__all__ = ["Members"]

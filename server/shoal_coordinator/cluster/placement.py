"""Which slice of which variable goes to which shard, and which shard to which server.

Pure functions: the same variables and servers always give the same plan. Both decisions are made by the longest-
processing-time rule (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969): the largest
first, each to where the fewest bytes are. The fullest then has at most 4/3 of what the best plan would give it.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from shoal import errors
from shoal._wire import Aggregation, ArenaLayout, ShardLayout, ShardPlacement, Slice, row_elements, wire_dtype
from shoal.variables import Variable

# So that shards can move when servers come and go.
_SHARDS_A_SERVER = 4
# A smaller shard is not worth moving, and each costs every step its bookkeeping.
_SMALLEST_SHARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """A live server, and the bytes on the wire of the shards of other jobs that are placed on it."""

    server: str
    address: str
    bytes: int


class PlacementPolicy(ABC):
    """Which server holds which shard. Pure: the same arguments always give the same placement."""

    @abstractmethod
    def assign(
        self, layouts: Sequence[ShardLayout], servers: Sequence[Candidate], home: Sequence[str] = ()
    ) -> tuple[ShardPlacement, ...]:
        """Gives each shard a server.

        Args:
            layouts: the shards.
            servers: all that are live.
            home: by shard, the server that had it before; empty: none had.

        Returns:
            A placement a shard, in the order of `layouts`.

        Raises:
            NotPlaced: there are no servers, or none that may take a shard.
        """


@dataclass(frozen=True)
class EvenPlacement(PlacementPolicy):
    """Every job over all servers, evenly by its bytes on the wire: see `assign_shards`."""

    def assign(
        self, layouts: Sequence[ShardLayout], servers: Sequence[Candidate], home: Sequence[str] = ()
    ) -> tuple[ShardPlacement, ...]:
        return assign_shards(layouts, servers, home)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [row_start, row_stop) of a variable, before they have a place."""

    name: str
    variable: Variable
    row_start: int
    row_stop: int
    wire: np.dtype

    @property
    def elements(self) -> int:
        return (self.row_stop - self.row_start) * row_elements(self.variable.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.wire.itemsize


def default_shards(servers: int, variables: Iterable[Variable]) -> int:
    """How many shards a job has that does not say: four a server, or one where they would be small."""
    nbytes = sum(math.prod(variable.shape) * variable.dtype.itemsize for variable in variables)
    return servers * min(_SHARDS_A_SERVER, max(1, nbytes // (servers * _SMALLEST_SHARD_BYTES)))


def plan_shards(
    variables: Mapping[str, Variable], shards: int, wire: np.dtype | None = None
) -> tuple[ShardLayout, ...]:
    """Cuts variables by their partitioners and shares the slices out evenly by bytes on the wire.

    Args:
        variables: the job's, by name.
        shards: how many to make, > 0. Fewer are made where there are not slices enough.
        wire: float32, or the half that trainable float32 travels as; None: float32.

    Returns:
        The shards, numbered from 0, none empty. A shard has an arena a dtype and aggregation, and there its slices lie
        in the order of the variables, then of the rows.

    Raises:
        InvalidJob: shards is not above 0.
    """
    if shards <= 0:
        raise errors.InvalidJob(f"shards is {shards}; a job has 1 or more", shards=shards)
    wanted = np.dtype(np.float32) if wire is None else wire
    pieces = [
        _Piece(name, variable, start, stop, wire_dtype(variable.dtype, variable.aggregation, wanted))
        for name, variable in variables.items()
        for start, stop in variable.slices()
    ]
    loads = [(0, shard) for shard in range(min(shards, len(pieces)))]
    members: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].nbytes):
        load, shard = loads[0]
        heapq.heapreplace(loads, (load + pieces[index].nbytes, shard))
        members[shard].append(index)
    return tuple(_lay_out(shard, [pieces[index] for index in sorted(indices)]) for shard, indices in enumerate(members))


def assign_shards(
    layouts: Sequence[ShardLayout], servers: Sequence[Candidate], home: Sequence[str] = ()
) -> tuple[ShardPlacement, ...]:
    """Shares shards out over servers, evenly by bytes on the wire.

    The job is balanced within itself, whatever else the servers hold: its steps are as fast as the server that moves
    the most of its bytes.

    Args:
        layouts: the shards.
        servers: all that are live. Of those with the same bytes of this job the one with fewer of its shards is taken,
            then the one that holds less of other jobs, then the one whose name comes first.
        home: by shard, the server that had it before. If all of those are live, and no other way is more even, each
            shard goes back to its own.

    Returns:
        A placement a shard, in the order of `layouts`.

    Raises:
        NotPlaced: there are no servers.
    """
    if not servers:
        raise errors.NotPlaced("there is no live server to place shards on; start one with `shoal server`")
    # (bytes of this job, shards of this job, bytes of others, name, index)
    loads = [(0, 0, server.bytes, server.server, index) for index, server in enumerate(servers)]
    heapq.heapify(loads)
    chosen: dict[int, Candidate] = {}
    for layout in sorted(layouts, key=lambda layout: (-layout.nbytes, layout.shard)):
        taken, count, others, name, index = loads[0]
        heapq.heapreplace(loads, (taken + layout.nbytes, count + 1, others, name, index))
        chosen[layout.shard] = servers[index]
    chosen = _at_home(layouts, servers, home, fullest=max((load for load, *_ in loads), default=0)) or chosen
    return tuple(
        ShardPlacement(layout, chosen[layout.shard].server, chosen[layout.shard].address) for layout in layouts
    )


def _at_home(
    layouts: Sequence[ShardLayout], servers: Sequence[Candidate], home: Sequence[str], *, fullest: int
) -> dict[int, Candidate] | None:
    """Each shard where it was; None: that cannot be, or gives a server more bytes than the fullest need have."""
    live = {server.server: server for server in servers}
    if len(home) != len(layouts) or not all(name in live for name in home):
        return None
    loads: Counter[str] = Counter()
    for layout in layouts:
        loads[home[layout.shard]] += layout.nbytes
    if max(loads.values(), default=0) > fullest:
        return None
    return {layout.shard: live[home[layout.shard]] for layout in layouts}


def _lay_out(shard: int, pieces: Sequence[_Piece]) -> ShardLayout:
    """Puts pieces, in order, one behind the other in the arenas of their kinds."""
    kinds: dict[tuple[np.dtype, Aggregation], list[_Piece]] = {}
    for piece in pieces:
        kinds.setdefault((piece.variable.dtype, piece.variable.aggregation), []).append(piece)
    arenas = []
    for (dtype, aggregation), members in kinds.items():
        *offsets, elements = accumulate((piece.elements for piece in members), initial=0)
        slices = tuple(
            Slice(piece.name, piece.row_start, piece.row_stop, offset)
            for piece, offset in zip(members, offsets, strict=True)
        )
        arenas.append(ArenaLayout(dtype, aggregation, slices, elements, members[0].wire))
    return ShardLayout(shard, tuple(arenas))

"""Placement: which slices form each shard, and which server holds each shard.

The functions are pure: the same variables and servers always give the same plan. Both decisions use the rule "longest
processing time first" (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969). The rule
takes the largest item first, and puts each item in the place with the fewest bytes. The fullest place then has at most
4/3 of the bytes that the fullest place of the best plan has.
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
from shoal.job import Job
from shoal.variables import Variable
from shoal_coordinator.messages import ProgramDescription

# Several shards for each server, so that shards can move when servers join or leave.
_SHARDS_PER_SERVER = 16
# A smaller shard is not worth moving.
_SMALLEST_SHARD_BYTES = 1 << 20
# A job with at most so many bytes of variables gets one shard, so one server, unless it asks for more. Its push is then
# one call instead of two for each server, and below this size the calls cost more than the bytes.
SMALL_JOB_BYTES = 4 << 20


@dataclass(frozen=True)
class Candidate:
    """A live server, and the wire bytes of other jobs' shards on it."""

    server: str
    address: str
    bytes: int


class PlacementPolicy(ABC):
    """The rule that assigns shards to servers. Pure: the same arguments always give the same placement."""

    @abstractmethod
    def assign(
        self, layouts: Sequence[ShardLayout], servers: Sequence[Candidate], previous_servers: Sequence[str] = ()
    ) -> tuple[ShardPlacement, ...]:
        """Assigns each shard to a server.

        Args:
            layouts: the shards.
            servers: all live servers that may take shards.
            previous_servers: by shard, the server that held it before; empty if none did.

        Returns:
            The placement of each shard, in the order of `layouts`.

        Raises:
            NotPlaced: no server can take a shard.
        """


@dataclass(frozen=True)
class EvenPlacement(PlacementPolicy):
    """Spreads each job over all servers, evenly by wire bytes: see `assign_shards`."""

    def assign(
        self, layouts: Sequence[ShardLayout], servers: Sequence[Candidate], previous_servers: Sequence[str] = ()
    ) -> tuple[ShardPlacement, ...]:
        return assign_shards(layouts, servers, previous_servers)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [row_start, row_stop) of a variable, before placement."""

    name: str
    variable: Variable
    row_start: int
    row_stop: int
    wire_dtype: np.dtype

    @property
    def elements(self) -> int:
        return (self.row_stop - self.row_start) * row_elements(self.variable.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.wire_dtype.itemsize


def default_shards(servers: int, variables: Iterable[Variable]) -> int:
    """Returns the default number of shards: one to 16 for each server, more for larger variables.

    A job whose variables take at most SMALL_JOB_BYTES in all, none with a partitioner, gets a single shard.
    """
    variables = list(variables)
    nbytes = sum(math.prod(variable.shape) * variable.dtype.itemsize for variable in variables)
    if nbytes <= SMALL_JOB_BYTES and all(variable.partitioner is None for variable in variables):
        return 1
    return servers * min(_SHARDS_PER_SERVER, max(1, nbytes // (servers * _SMALLEST_SHARD_BYTES)))


def plan_shards(
    variables: Mapping[str, Variable], shards: int, wire: np.dtype | None = None
) -> tuple[ShardLayout, ...]:
    """Cuts variables by their partitioners, and distributes the slices evenly by wire bytes.

    Args:
        variables: the job's variables, by name.
        shards: number of shards, > 0. If there are fewer slices, fewer shards are made.
        wire: the wire dtype of trainable float32 variables; None means float32.

    Returns:
        The shards, numbered from 0, none empty. A shard has one arena for each dtype and aggregation, with its slices
        in the order of the variables, then of the rows.

    Raises:
        InvalidJob: shards is not above 0.
    """
    if shards <= 0:
        raise errors.InvalidJob(f"shards is {shards}; use 1 or more", shards=shards)
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


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What the shards of a description depend on.

    A plan of 10,000 variables takes 0.1 s. So the thread that has decoded a description makes the plan, without the
    coordinator's lock, and the scheduler finds it.

    Attributes:
        shards: number of shards that the job asks for; 0 for the default.
        servers: number of servers, on which the default depends; 0 if the job asks for a number of shards.
        wire_dtype: wire dtype of the job.
    """

    shards: int
    servers: int
    wire_dtype: str

    @classmethod
    def of(cls, spec: Job, servers: int) -> "ShardPlan":
        """Returns the plan of a job's shards on so many servers, at least one."""
        return cls(spec.shards, 0 if spec.shards else servers, spec.wire_dtype)

    def layouts(self, program: ProgramDescription) -> tuple[ShardLayout, ...]:
        """Returns the shards of a description. It keeps the newest plan, and any thread may call it.

        Raises:
            InvalidJob: see `plan_shards`.
        """
        found = program.plans.get(self)
        if found is None:
            shards = self.shards or default_shards(self.servers, program.variables.values())
            found = plan_shards(program.variables, shards, np.dtype(self.wire_dtype))
            program.plans.clear()
            program.plans[self] = found
        return found


def assign_shards(
    layouts: Sequence[ShardLayout], servers: Sequence[Candidate], previous_servers: Sequence[str] = ()
) -> tuple[ShardPlacement, ...]:
    """Assigns shards to servers, evenly by wire bytes.

    Each job is balanced by itself, whatever else the servers hold, because the server that moves the most bytes of a
    job determines the time of its steps.

    Args:
        layouts: the shards.
        servers: all live servers. Ties in the job's bytes go to the server with fewer of its shards, then to the one
            with fewer bytes of other jobs, then to the first by name.
        previous_servers: by shard, the server that held it before. If all of them are live, and no other placement is
            more even, each shard returns to its own.

    Returns:
        The placement of each shard, in the order of `layouts`.

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
    chosen = (
        _on_previous_servers(layouts, servers, previous_servers, fullest=max((load for load, *_ in loads), default=0))
        or chosen
    )
    return tuple(
        ShardPlacement(layout, chosen[layout.shard].server, chosen[layout.shard].address) for layout in layouts
    )


def candidates_for_one_server(servers: Sequence[Candidate], previous_servers: Sequence[str] = ()) -> list[Candidate]:
    """Returns the server for a job whose shards must be on one server.

    Args:
        servers: all live servers that may take shards, at least one.
        previous_servers: by shard, the server that held it before. If that server is live, it is chosen.

    Returns:
        The only candidate: the previous server, else the one with the fewest bytes of other jobs, else the first by
        name.
    """
    return [min(servers, key=lambda server: (server.server not in previous_servers, server.bytes, server.server))]


def _on_previous_servers(
    layouts: Sequence[ShardLayout], servers: Sequence[Candidate], previous_servers: Sequence[str], *, fullest: int
) -> dict[int, Candidate] | None:
    """Returns the placement on the previous servers; None if one is gone, or if that placement is less even."""
    live = {server.server: server for server in servers}
    if len(previous_servers) != len(layouts) or not all(name in live for name in previous_servers):
        return None
    loads: Counter[str] = Counter()
    for layout in layouts:
        loads[previous_servers[layout.shard]] += layout.nbytes
    if max(loads.values(), default=0) > fullest:
        return None
    return {layout.shard: live[previous_servers[layout.shard]] for layout in layouts}


def _lay_out(shard: int, pieces: Sequence[_Piece]) -> ShardLayout:
    """Puts pieces one after the other, in order, into the arenas of their kinds."""
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
        arenas.append(ArenaLayout(dtype, aggregation, slices, elements, members[0].wire_dtype))
    return ShardLayout(shard, tuple(arenas))

"""Shard: slices of variables in arenas; the unit of placement and of checkpoint files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import consistency, errors, optim, variables
from shoal._wire import ArenaLayout, ShardLayout, check_address, check_text
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards.values.snapshot import ShardSnapshot
from shoal_server.shards.values.stored_slab import StoredSlab


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server of a job.

    Attributes:
        server: member id.
        address: host:port.
    """

    server: str
    address: str


@dataclass(frozen=True, slots=True)
class JobShardConfig:
    """The configuration that all shards of a job on a server share.

    Attributes:
        name: name of the job.
        generation: generation of the placement.
        variables: the job's variables, by name.
        optimizer: the optimizer.
        consistency: the consistency mode.
        seed: the job's seed.
        peers: the other servers of the job, if updates need the norm of the whole gradient.
    """

    name: str
    generation: int
    variables: dict[str, Variable]
    optimizer: optim.Optimizer
    consistency: consistency.Consistency
    seed: int
    peers: tuple[Peer, ...] = ()

    @classmethod
    def from_proto(cls, message: pb.CreateShardsRequest) -> "JobShardConfig":
        """Returns the configuration that a message carries.

        Raises:
            BadRequest, InvalidVariable, InvalidOptimizer, InvalidJob: it is not valid.
        """
        for peer in message.peers:
            check_text("the name of a server", peer.server)
            check_address("the address of a server", peer.address)
        return cls(
            name=message.job,
            generation=message.generation,
            variables=variables.from_protos(message.variables),
            optimizer=optim.from_proto(message.optimizer),
            consistency=consistency.from_proto(message.consistency),
            seed=message.seed,
            peers=tuple(Peer(peer.server, peer.address) for peer in message.peers),
        )

    def to_proto(self, layouts: Iterable[ShardLayout]) -> pb.CreateShardsRequest:
        """Returns the message that creates these shards elsewhere."""
        return pb.CreateShardsRequest(
            job=self.name,
            generation=self.generation,
            variables=[variable.to_proto(name) for name, variable in self.variables.items()],
            shards=[layout.to_proto() for layout in layouts],
            optimizer=self.optimizer.to_proto(),
            consistency=self.consistency.to_proto(),
            seed=self.seed,
            peers=[pb.Peer(server=peer.server, address=peer.address) for peer in self.peers],
        )


def check_slot(config: JobShardConfig, slot: str) -> None:
    """Raises BadRequest if the optimizer of a job has no slot of this name."""
    if slot not in config.optimizer.slots:
        raise errors.BadRequest(
            f"the optimizer of {config.name} is {config.optimizer.name}, which has no slot {slot!r:.100}; it has "
            f"{', '.join(config.optimizer.slots) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class Stamp:
    """The permanent name of a push within its job."""

    worker: str
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class Arena:
    """An arena: a part of a slab.

    Attributes:
        layout: layout of the arena.
        slab: the slab that holds its elements.
        start: the slab's element at which it starts.
    """

    layout: ArenaLayout
    slab: StoredSlab
    start: int

    @property
    def values(self) -> np.ndarray:
        """The values, as a flat view of the slab's current memory."""
        return self.slab.values[self._elements]

    @property
    def slots(self) -> Mapping[str, np.ndarray]:
        """The slots by name, as flat views of the slab's current memory."""
        return {name: slot[self._elements] for name, slot in self.slab.slots.items()}

    @property
    def _elements(self) -> slice:
        return slice(self.start, self.start + self.layout.elements)


class Shard:
    """Slices of variables that are placed and saved together. The lock of its group guards it.

    Args:
        job: name of the job.
        layout: the shard's layout.
        arenas: its arenas.

    Attributes:
        layout, arenas: as given.
    """

    def __init__(self, job: str, layout: ShardLayout, arenas: Sequence[Arena]) -> None:
        self.layout, self.arenas = layout, arenas
        self._name = f"{job}/{layout.shard}"

    def begin_saving(self, version: int) -> ShardSnapshot:
        """Returns a snapshot of the current values and slots. Its owner must call `end_saving`.

        Args:
            version: number of updates in the values.
        """
        return ShardSnapshot(self.layout, [(arena.slab.latest(version), arena.start) for arena in self.arenas])

    def non_finite(self, index: int, element: int, value: float) -> errors.NonFiniteGradient:
        """Returns the error for a push whose arena holds NaN or Inf.

        Args:
            index: index of the arena.
            element: index of the element in the arena.
            value: the element.
        """
        arena = self.layout.arenas[index]
        name = next(part.variable for part in reversed(arena.slices) if part.offset <= element)
        return errors.NonFiniteGradient(
            f"{self._name}: the push for {name!r} contains {value}; the whole push was rejected and "
            "no variable changed. Check for a learning rate that is too large or a division by zero, or skip this step "
            "(session.skip())",
            variable=name,
            value=value,
        )

"""Puller: fetches the values of one step from all servers, for one participant."""

from dataclasses import dataclass

import numpy as np

from shoal._memory.buffers import BufferPool
from shoal._training.placed_servers import PlacedServers
from shoal._transport import ServerConnection
from shoal._wire import PullDecoder
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

# Limits of the buffer pool for values: bytes retained, and seconds before they are released.
_SPARE_BYTES, _SPARE_S = 1 << 30, 30.0


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a pull.

    Attributes:
        values: arrays by variable; empty for a barrier.
        versions: version of each shard, by its number.
        step: the step that the values are for.
    """

    values: dict[str, np.ndarray]
    versions: dict[int, int]
    step: int


class Puller:
    """Pulls a job's variables. Only one thread may use it at a time.

    Args:
        servers: servers of the job.
    """

    def __init__(self, servers: PlacedServers) -> None:
        self._servers = servers
        self._memory = BufferPool(_SPARE_BYTES, _SPARE_S)

    def fetch(self, step: int, *, ahead: int, moves_values: bool) -> PullResult:
        """Pulls from all servers, until all shards are at one step.

        With backup workers, shards may close a step without this worker, some before others. The method then repeats
        the pull for the newest step. The worker thus does not work on a closed step, and the shards that are behind
        learn that it skips their step.

        Args:
            step: number of steps that this worker has finished, which is also the number of its current step.
            ahead: 0 for the values of this step, 1 for those of the next one.
            moves_values: whether to fetch values; False only waits.

        Returns:
            The values, and the step that they are for.

        Raises:
            Fenced, UnknownJob, Unreachable: as for `ParameterClient.pull`.
        """
        self._memory.trim()
        while True:
            headers, pull_decoder = self._pull_all(step, ahead, moves_values=moves_values)
            newest = max(step + ahead, *(header.step for header in headers))
            if all(header.step == newest for header in headers):
                versions = {header.shard: header.version for header in headers}
                return PullResult(pull_decoder.values() if pull_decoder else {}, versions, newest)
            step = newest - ahead

    def fetch_slot(self, step: int, slot: str) -> PullResult:
        """Pulls an optimizer slot of all trainable variables, as `fetch` pulls values: at the newest step.

        Args:
            step: as for `fetch`.
            slot: name of the slot.

        Raises:
            BadRequest: the optimizer has no such slot.
            Fenced, UnknownJob, Unreachable: as for `ParameterClient.pull`.
        """
        servers = self._servers
        decoders: list[PullDecoder] = []  # a new one for each placement

        def begin() -> None:
            decoders[:] = [PullDecoder(servers.slot_packer, lambda nbytes: np.empty(nbytes, np.uint8))]

        def pull(connection: ServerConnection) -> list[header_pb2.ShardHeader]:
            request = pb.PullRequest(stamp=servers.stamp(step), shards=connection.indices, slot=slot)
            layout = servers.slot_packer.groups[connection.group]
            return servers.calls.retrying(
                connection, lambda: connection.pull_slot(request, decoders[0], layout), waits=True
            )

        headers = [header for headers in servers.each(pull, begin=begin) for header in headers]
        variables = servers.slot_packer.variables
        trained = {name: it for name, it in decoders[0].values().items() if variables[name].trainable}
        versions = {header.shard: header.version for header in headers}
        return PullResult(trained, versions, max(header.step for header in headers))

    def _pull_all(
        self, step: int, ahead: int, *, moves_values: bool
    ) -> tuple[list[header_pb2.ShardHeader], PullDecoder | None]:
        servers = self._servers
        pull_decoder: PullDecoder | None = None

        def begin() -> None:
            nonlocal pull_decoder  # a new one for each placement, without values of the last one
            pull_decoder = PullDecoder(servers.packer, self._memory.take) if moves_values else None

        def pull(connection: ServerConnection) -> list[header_pb2.ShardHeader]:
            request = pb.PullRequest(
                stamp=servers.stamp(step), shards=connection.indices, headers_only=not moves_values, ahead=ahead
            )
            return servers.calls.retrying(connection, lambda: connection.pull(request, pull_decoder), waits=True)

        headers = [header for headers in servers.each(pull, begin=begin) for header in headers]
        return headers, pull_decoder


__all__ = ["PullResult", "Puller"]

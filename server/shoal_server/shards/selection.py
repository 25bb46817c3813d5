"""Selection: the shards that a request names, in its order. It keeps values that all calls with these shards need."""

from collections.abc import Sequence
from functools import cached_property

from shoal import errors
from shoal._wire import region_offsets
from shoal_server.shards.shard import Shard


class Selection:
    """Some shards of a lock group. Immutable, and shared by the calls that name the same shards.

    Args:
        job: name of the job.
        generation: generation of the shards.
        shards: the shards, in the order of the request.
        hosted: number of shards of the group.

    Attributes:
        generation: generation of the shards.
        shards: the shards.
        layouts: their layouts.
        whole: whether these are all shards of the group.
        nbytes: bytes of their values on the wire.
    """

    def __init__(self, job: str, generation: int, shards: Sequence[Shard], hosted: int) -> None:
        self._job, self.generation, self._hosted = job, generation, hosted
        self.shards = shards
        self.layouts = [shard.layout for shard in shards]
        self.whole = len(shards) == hosted
        self.nbytes = sum(layout.nbytes for layout in self.layouts)

    @cached_property
    def region_bytes(self) -> int:
        """Bytes that the shards take in a region of shared memory."""
        return region_offsets(self.layouts)[1]

    def check_whole(self, call: str) -> None:
        """Raises BadRequest unless these are all shards of the group: a worker has one clock for all of them.

        Args:
            call: what the worker asks for, for the message.
        """
        if not self.whole:
            raise errors.BadRequest(
                f"a worker's {call} names {len(self.shards)} of the {self._hosted} shards of {self._job} on this "
                "server; name all of them in one call (only a reader's pull may name some)"
            )

"""Selection: the shards that a request names, in the request's order.

Requests that name the same shards share a selection, with values that are computed once for all of them.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from shoal import errors
from shoal._wire import region_offsets
from shoal_server.shards.shard import JobShardConfig, Shard

# Selections that a group remembers. Clients name the same shards in each call, so a job has one or two.
_REMEMBERED = 16


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

    @classmethod
    def of(cls, config: JobShardConfig, shards: Mapping[int, Shard], indices: Sequence[int]) -> "Selection":
        """Returns the selection that a request names.

        Args:
            config: the job's configuration.
            shards: all shards of the job on this server, by number.
            indices: numbers of the shards, in the request's order.

        Raises:
            BadRequest: no shard is named, or one is named twice.
            UnknownShard: this server does not host them.
        """
        name = config.name
        if not indices or len(set(indices)) != len(indices):
            raise errors.BadRequest(
                f"a request names the shards {list(indices)} of {name}; name at least one, and each only once"
            )
        missing = [index for index in indices if index not in shards]
        if missing:
            raise errors.UnknownShard(f"this server does not host shards {missing} of {name}; it has {sorted(shards)}")
        return cls(name, config.generation, [shards[index] for index in indices], len(shards))

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


class Selections:
    """The selections of one lock group. Any thread may use it, without a lock.

    Args:
        config: the job's configuration.
    """

    def __init__(self, config: JobShardConfig) -> None:
        self._config = config
        self._by_key: dict[tuple[int, ...], Selection] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, shards: Mapping[int, Shard], indices: Sequence[int]) -> Selection:
        """Returns a selection; the arguments and errors are those of `Selection.of`."""
        key = tuple(indices)
        found = self._by_key.get(key)
        if found is None:
            found = Selection.of(self._config, shards, key)
            if len(self._by_key) >= _REMEMBERED:
                self._by_key = {}
            self._by_key[key] = found
        return found

    def clear(self) -> None:
        """Forgets the selections, because shards were added."""
        self._by_key = {}

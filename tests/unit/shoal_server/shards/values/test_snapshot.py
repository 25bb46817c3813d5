"""Snapshot of a slab's values: each reader sees the version at which it began, and only updates copy values."""

import threading
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import consistency, initializers, optim
from shoal._memory.buffers import SMALLEST_BYTES, BufferPool
from shoal._wire import Chunk, framing
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout, Slice
from shoal.variables import Variable
from shoal_server.optimizers import conversions
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.values.reading import Reading
from shoal_server.shards.values.shard import JobShardConfig, Stamp

CHUNK_BYTES = 4000  # small, so that few elements make several chunks


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_server.shards.values.reading.CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(framing, "CHUNK_BYTES", CHUNK_BYTES)
        yield


class Memory(BufferPool):
    """A pool that keeps nothing, and counts what is taken."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.taken: list[int] = []

    def take(self, nbytes: int) -> np.ndarray:
        self.taken.append(nbytes)
        return np.full(nbytes, 0xEE, np.uint8)


class Reader:
    """A reader of a shard under way: what it has got, and what it is to get."""

    def __init__(self, made: LockGroup) -> None:
        self.expected = [array.astype(arena.wire_dtype).tobytes() for array, arena in zip(*kept(made), strict=True)]
        self._values = begun(made)
        self.version = self._values.version
        assert self.version == made.version
        self._chunks = self._values.chunks()
        self._got: list[Chunk] = []

    def check_advance(self) -> bool:
        """Takes the next chunk; False: there is none."""
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        assert 0 < len(chunk.data) <= CHUNK_BYTES
        self._got.append(chunk)  # not copied: it is good while the reader is there
        return True

    def check_finish(self) -> None:
        while self.check_advance():
            pass
        got = [b""] * len(self.expected)
        for chunk in self._got:
            assert chunk.offset == len(got[chunk.arena])
            got[chunk.arena] += chunk.data
        assert got == self.expected
        self.leave()

    def leave(self) -> None:
        self._values.__exit__()


def kept(made: LockGroup) -> tuple[list[np.ndarray], tuple[ArenaLayout, ...]]:
    """A shard's arrays, and their arenas' layouts."""
    return [arena.values for arena in made.shards[0].arenas], made.shards[0].layout.arenas


MOVES = st.lists(
    st.one_of(
        st.just(("begin", 0)),
        st.just(("update", 0)),
        st.tuples(st.just("read"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=40,
)


@given(MOVES)
def test_each_reader_gets_the_version_that_it_began_with(moves: Sequence[tuple[str, int]]) -> None:
    made = shard()
    readings = []
    for move, index in moves:
        match move:
            case "begin":
                readings.append(Reader(made))
            case "update":
                update(made)
            case "read" if readings:
                readings[index % len(readings)].check_advance()
            case "leave" if readings:
                readings.pop(index % len(readings)).leave()
    for reading in readings:
        reading.check_finish()


def test_reading_everything_at_once_is_reading_it_in_chunks() -> None:
    made = shard()
    first = Reader(made)
    with begun(made) as second:
        update(made)
        assert [array.tobytes() for array in all_of(made, second, whole=True)] == first.expected
    first.check_finish()


def test_halves_are_rounded_as_numpy_rounds_them() -> None:
    random = np.random.default_rng(3)
    values = [(random.standard_normal(size) * 1000).astype(np.float32) for size in (23, 9)]
    arenas = tuple(
        ArenaLayout(np.dtype(dtype), Aggregation.TRAINABLE, (Slice(dtype, 0, array.size, 0),), array.size)
        for dtype, array in zip(("float32", "bfloat16"), values, strict=True)
    )
    variables = {"float32": Variable((23,)), "bfloat16": Variable((9,), "bfloat16")}
    config = JobShardConfig("job", 1, variables, optim.SGD(1.0), consistency.Asynchronous(), 0)
    made = LockGroup(config, [ShardLayout(0, arenas)])
    shards = made.select([0])
    made.assign(shards, dict(zip(shards.layout.slabs, values, strict=True)))
    with begun(made) as reader:
        whole, halves = all_of(made, reader, whole=False)
    assert whole.tobytes() == values[0].tobytes()
    assert halves.tobytes() == values[1].astype(ml_dtypes.bfloat16).tobytes()


class TestMemory:
    def test_nothing_is_copied_without_an_update(self) -> None:
        made = shard(memory := Memory())
        for _ in range(3):
            Reader(made).check_finish()
        assert memory.taken == []

    def test_nothing_is_copied_without_a_reader(self) -> None:
        made = shard(memory := Memory())
        update(made)
        Reader(made).check_finish()
        abandoned = Reader(made)
        abandoned.check_advance()
        abandoned.leave()
        update(made)
        assert memory.taken == []

    def test_the_values_are_copied_once_for_all_readers_and_all_updates(self) -> None:
        made = shard(memory := Memory())
        readings = [Reader(made) for _ in range(3)]
        for _ in range(3):
            update(made)
        assert memory.taken == [array.nbytes for array in kept(made)[0]]
        for reading in readings:
            reading.check_finish()

    def test_what_is_sent_is_the_shards_own_memory(self) -> None:
        made = shard()
        with begun(made) as values:
            for chunk in values.chunks():
                array = kept(made)[0][chunk.arena]
                assert np.shares_memory(np.frombuffer(chunk.data, np.uint8), array) == (chunk.arena != HALVES)

    def test_memory_goes_back_to_the_pool_with_its_last_reader(self) -> None:
        made = shard(pool := BufferPool(1 << 20, 60.0), size=SMALLEST_BYTES // 4)
        for returned in (0, 1):  # first, its own memory is left, which is no pool's; then what came from the pool
            readers = [begun(made) for _ in range(2)]
            update(made)
            while readers:
                assert pool.free_bytes == 0
                readers.pop().__exit__()
            assert pool.free_bytes == returned * SMALLEST_BYTES


HALVES = 2  # the index of the arena that is kept in another dtype than it travels in


def shard(memory: BufferPool | None = None, size: int = 3000) -> LockGroup:
    variables = {
        "w": Variable((size,), initializer=initializers.Zeros()),
        "d": Variable((500,), dtype="float64", initializer=initializers.Zeros()),
        "h": Variable((700,), dtype="bfloat16", initializer=initializers.Zeros()),
    }
    arenas = [
        ArenaLayout(spec.dtype, spec.aggregation, (Slice(name, 0, spec.shape[0], 0),), spec.shape[0])
        for name, spec in variables.items()
    ]
    terms = JobShardConfig("job", 1, variables, optim.SGD(1.0), consistency.Asynchronous(), 0)
    made = LockGroup(terms, [ShardLayout(0, tuple(arenas))], memory=memory)
    made.admit("a", 1, 0)
    return made


def begun(made: LockGroup) -> Reading:
    return made.read(made.select([0]))


def update(made: LockGroup) -> None:
    """After it, all elements are one larger: the version."""
    payload = {index: np.full(array.size, -1, array.dtype) for index, array in enumerate(kept(made)[0])}
    stamp = Stamp("a", 1, made.version)
    made.stage(stamp, 1.0, made.version, payload)
    made.commit(stamp)


class TestInAShard:
    def test_readers_of_one_version_share_a_snapshot(self) -> None:
        made = shard()
        with begun(made) as first, begun(made) as second:
            for one, other in zip(first.values, second.values, strict=True):
                assert np.shares_memory(one, other)
            update(made)
            with begun(made) as third:
                assert (first.version, second.version, third.version) == (0, 0, 1)

    def test_assigned_values_are_not_seen_by_who_began_before(self) -> None:
        made = shard()
        with begun(made) as before:
            shards = made.select([0])
            values: list[np.ndarray] = [np.ones(3000, np.float32), np.ones(500), np.ones(700, np.float32)]
            made.assign(shards, dict(zip(shards.layout.slabs, values, strict=True)))
            with begun(made) as after:
                assert not any(array.any() for array in all_of(made, before, whole=False))
                assert all(array.all() for array in all_of(made, after, whole=False))

    @pytest.mark.parametrize("whole", [False, True], ids=["in chunks", "at once"])
    def test_readers_in_threads_never_see_two_versions_at_once(self, whole: bool) -> None:
        """Readers start whenever they like, while updates go on as fast as they can."""
        made = shard(BufferPool(1 << 20, 60.0))
        updates, over = 150, threading.Event()
        seen: list[set[int]] = [set() for _ in range(3)]
        failures: list[int] = []

        def reads(found: set[int]) -> None:
            while not over.is_set():
                with begun(made) as reader:
                    arenas = all_of(made, reader, whole=whole)
                    if any((array != np.asarray(reader.version, array.dtype)).any() for array in arenas):
                        failures.append(reader.version)
                        return
                    found.add(reader.version)

        threads = [threading.Thread(target=reads, args=(found,)) for found in seen]
        for thread in threads:
            thread.start()
        for _ in range(updates):
            update(made)
        over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert made.version == updates
        assert all(seen)


def all_of(made: LockGroup, reader: Reading, *, whole: bool) -> list[np.ndarray]:
    """The arenas that a reader gets."""
    arenas = [np.empty(arena.elements, arena.wire_dtype) for arena in made.shards[0].layout.arenas]
    if whole:
        conversions.send_all([*zip(arenas, reader.values, strict=True)])
        return arenas
    flat = [array.view(np.uint8) for array in arenas]
    for chunk in reader.chunks():
        flat[chunk.arena][chunk.offset : chunk.offset + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
    return arenas

"""A reader of a shard's values gets the version that it began with, and only what it still needs is ever copied."""

import threading
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import consistency, initializers, optim
from shoal._buffers import SMALLEST_BYTES, BufferPool
from shoal._layout import Aggregation, ArenaLayout, ShardLayout, Slice
from shoal.variables import Variable
from shoal_server import snapshot
from shoal_server.shard import JobTerms, Shard, Stamp
from shoal_server.snapshot import Snapshot

# By arena: as it travels, as it is kept, and how many.
ARENAS = (("float32", "float32", 23), ("bfloat16", "float32", 9), ("float64", "float64", 6), ("int64", "int64", 4))
CHUNK_BYTES = 16  # small, so that a few elements make many chunks


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(snapshot, "_BLOCK", 5)
        yield


def layout_of(arenas=ARENAS):
    made = []
    for dtype, _, elements in arenas:
        aggregation = Aggregation.SUM if dtype == "int64" else Aggregation.TRAINABLE
        made.append(ArenaLayout(np.dtype(dtype), aggregation, (Slice(dtype, 0, elements, 0),), elements))
    return ShardLayout(7, tuple(made))


@dataclass
class Memory:
    """Stands in for a pool: counts what is taken."""

    taken: list[int] = field(default_factory=list)

    def take(self, nbytes):
        self.taken.append(nbytes)
        return np.full(nbytes, 0xEE, np.uint8)


class Values:
    """A shard's values, its current snapshot, and updates that write over every element."""

    def __init__(self, seed=0, arenas=ARENAS):
        self.memory, self.version = Memory(), 0
        self._random = np.random.default_rng(seed)
        self._layout = layout_of(arenas)
        self.arrays = [self._drawn(kept, elements) for _, kept, elements in arenas]
        self.snapshot = None

    def reader(self):
        """As `Shard.read`."""
        reader = self.snapshot.reader() if self.snapshot else None
        if reader is None:
            self.snapshot = Snapshot(self.version, self._layout, self.arrays, self.memory)
            reader = self.snapshot.reader()
        return reader

    def update(self):
        if self.snapshot:
            self.snapshot.detach()
        self.version += 1
        for array in self.arrays:
            array[:] = self._drawn(array.dtype, array.size)

    def on_the_wire(self):
        """The bytes of each arena, now."""
        return [
            array.astype(arena.wire).tobytes() for array, arena in zip(self.arrays, self._layout.arenas, strict=True)
        ]

    def _drawn(self, dtype, elements):
        return (self._random.standard_normal(elements) * 1000).astype(dtype)


class Reading:
    """A reader under way: what it has got, and what it is to get."""

    def __init__(self, values):
        self._reader = values.reader()
        self.expected, self.version = values.on_the_wire(), values.version
        self._chunks = self._reader.chunks()
        self.got = [b""] * len(self.expected)
        assert self._reader.version == self.version

    def advance(self):
        """Takes the next chunk; False: there is none."""
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        assert chunk.shard == 7
        assert chunk.offset == len(self.got[chunk.arena])
        assert 0 < len(chunk.data) <= CHUNK_BYTES
        self.got[chunk.arena] += chunk.data
        return True

    def finish(self):
        while self.advance():
            pass
        assert self.got == self.expected
        self.leave()

    def leave(self):
        self._reader.__exit__()


MOVES = st.lists(
    st.one_of(
        st.just(("begin", 0)),
        st.just(("update", 0)),
        st.tuples(st.just("read"), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(MOVES, st.integers(0, 99))
def test_each_reader_gets_the_version_that_it_began_with(moves, seed):
    values = Values(seed)
    readings = []
    for move, index in moves:
        match move:
            case "begin":
                readings.append(Reading(values))
            case "update":
                values.update()
            case "read" if readings:
                readings[index % len(readings)].advance()
            case "leave" if readings:
                readings.pop(index % len(readings)).leave()
    for reading in readings:
        reading.finish()


def test_reading_everything_at_once_is_reading_it_in_chunks():
    values = Values()
    first, second = Reading(values), values.reader()
    targets = [np.empty(elements, dtype) for dtype, _, elements in ARENAS]
    values.update()
    with second as reader:
        reader.write(targets)
    assert [target.tobytes() for target in targets] == first.expected
    first.finish()


def test_halves_are_rounded_as_numpy_rounds_them():
    values = Values()
    reading = Reading(values)
    expected = values.arrays[1].astype(ml_dtypes.bfloat16).tobytes()
    reading.finish()
    assert reading.got[1] == expected


class TestMemory:
    def test_nothing_is_copied_without_an_update(self):
        values = Values()
        for _ in range(3):
            Reading(values).finish()
        assert values.memory.taken == []

    def test_nothing_is_copied_without_a_reader(self):
        values = Values()
        values.update()
        Reading(values).finish()
        given_up = Reading(values)
        given_up.advance()
        given_up.leave()
        values.update()
        assert values.memory.taken == []

    def test_nothing_is_copied_for_readers_that_have_read_all(self):
        values = Values()
        reading = Reading(values)
        while reading.advance():
            pass
        values.update()
        assert sum(values.memory.taken) == 0
        reading.finish()

    def test_what_all_readers_are_past_is_not_copied(self):
        values = Values()
        ahead, behind = Reading(values), Reading(values)
        for _ in range(9):
            ahead.advance()
        for _ in range(7):  # six chunks of the first arena, one of eight halves
            behind.advance()
        values.update()
        assert values.memory.taken == [(9 - 8) * 4, 6 * 8, 4 * 8]
        ahead.finish()
        behind.finish()

    def test_the_rest_is_copied_once_for_all_readers_and_all_updates(self):
        values = Values()
        readings = [Reading(values) for _ in range(3)]
        for _ in range(3):
            values.update()
        assert values.memory.taken == [array.nbytes for array in values.arrays]
        for reading in readings:
            reading.finish()

    def test_who_comes_after_an_update_reads_the_new_version(self):
        values = Values()
        old = Reading(values)
        held = values.snapshot
        values.update()
        assert held.reader() is None
        new = Reading(values)
        assert (old.version, new.version) == (0, 1)
        assert old.expected != new.expected
        old.finish()
        new.finish()

    def test_copies_go_back_to_the_pool_with_their_last_reader(self):
        arenas = (("float32", "float32", SMALLEST_BYTES // 4), ("float64", "float64", SMALLEST_BYTES // 4))
        values = Values(arenas=arenas)
        values.memory = pool = BufferPool(1 << 20, 60.0)
        readers = [values.reader() for _ in range(2)]
        values.update()
        assert pool.free_bytes == 0
        while readers:
            assert pool.free_bytes == 0
            readers.pop().__exit__()
            values.snapshot = None  # as a shard, which only looks whether it is there
        assert pool.free_bytes == 3 * SMALLEST_BYTES


def shard(memory=None):
    variables = {
        "w": Variable((3000,), initializer=initializers.Zeros()),
        "d": Variable((500,), dtype="float64", initializer=initializers.Zeros()),
        "h": Variable((700,), dtype="bfloat16", initializer=initializers.Zeros()),
    }
    arenas = [
        ArenaLayout(spec.dtype, spec.aggregation, (Slice(name, 0, spec.shape[0], 0),), spec.shape[0])
        for name, spec in variables.items()
    ]
    terms = JobTerms("job", 1, variables, optim.SGD(1.0), consistency.Asynchronous(), 0)
    made = Shard(terms, ShardLayout(0, tuple(arenas)), memory=memory)
    made.admit("a", 1, 0)
    return made


def update(made, step):
    """After it, all elements are one larger: the version."""
    payload = {0: np.full(3000, -1, np.float32), 1: np.full(500, -1.0), 2: np.full(700, -1, np.float32)}
    stamp = Stamp("a", 1, step)
    made.stage(stamp, 1.0, step, payload)
    made.commit(stamp)


class TestInAShard:
    def test_readers_of_one_version_share_a_snapshot(self):
        made = shard()
        with made.read() as first, made.read() as second:
            assert first._snapshot is second._snapshot
            update(made, 0)
            with made.read() as third:
                assert (first.version, second.version, third.version) == (0, 0, 1)

    def test_a_snapshot_that_nobody_reads_is_gone(self):
        made = shard()
        with made.read():
            assert made._snapshot() is not None
        assert made._snapshot() is None

    def test_assigned_values_are_not_seen_by_who_began_before(self):
        made = shard()
        with made.read() as before:
            made.assign({0: np.ones(3000, np.float32), 1: np.ones(500), 2: np.ones(700, np.float32)})
            with made.read() as after:
                assert not any(array.any() for array in all_of(before, whole=False))
                assert all(array.all() for array in all_of(after, whole=False))

    @pytest.mark.parametrize("whole", [False, True], ids=["in chunks", "at once"])
    def test_readers_in_threads_never_see_two_versions_at_once(self, whole):
        """Readers start whenever they like, while updates go on as fast as they can."""
        made = shard(BufferPool(1 << 20, 60.0))
        updates, over = 150, threading.Event()
        seen, failures = [set() for _ in range(3)], []

        def reads(found):
            while not over.is_set():
                with made.read() as reader:
                    arenas = all_of(reader, whole=whole)
                    if any((array != np.asarray(reader.version, array.dtype)).any() for array in arenas):
                        failures.append(reader.version)
                        return
                    found.add(reader.version)

        threads = [threading.Thread(target=reads, args=(found,)) for found in seen]
        for thread in threads:
            thread.start()
        for step in range(updates):
            update(made, step)
        over.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert made.version == updates
        assert all(seen)


def all_of(reader, *, whole):
    """The arenas that a reader gets."""
    arenas = [np.empty(arena.elements, arena.wire) for arena in reader.layout.arenas]
    if whole:
        reader.write(arenas)
        return arenas
    flat = [array.view(np.uint8) for array in arenas]
    for chunk in reader.chunks():
        flat[chunk.arena][chunk.offset : chunk.offset + len(chunk.data)] = np.frombuffer(chunk.data, np.uint8)
    return arenas

"""Framing of slabs: the assembler rebuilds the exact slabs from chunks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire import framing
from shoal._wire.chunks import Chunk
from shoal._wire.framing import Assembler, SlabRange, copy_elements, messages
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout, Slice
from shoal._wire.limits import CHUNK_BYTES
from shoal._wire.slabs import CallLayout, Slab

DTYPES = [np.dtype(dtype) for dtype in ("float32", "float64", "float16", "int64")] + [np.dtype(ml_dtypes.bfloat16)]


def arena(
    elements: int,
    dtype: np.dtype[Any] | str = "float32",
    aggregation: Aggregation = Aggregation.TRAINABLE,
    wire: str | None = None,
) -> ArenaLayout:
    dtype = np.dtype(dtype)
    slices = (Slice("v", 0, elements, 0),)
    return ArenaLayout(dtype, aggregation, slices, elements, *([np.dtype(wire)] if wire else []))


layouts = st.lists(
    st.lists(st.builds(arena, st.integers(1, 40), st.sampled_from(DTYPES), st.sampled_from(Aggregation)), max_size=3),
    max_size=4,
).map(lambda shards: [ShardLayout(3 * number + 1, tuple(arenas)) for number, arenas in enumerate(shards)])


def cut(draw: Callable[..., Any], elements: int) -> list[tuple[int, int]]:
    """Boundaries of some runs of elements, in order: all of them, without gaps."""
    inner = draw(st.sets(st.integers(1, elements - 1), max_size=5)) if elements > 1 else set()
    edges = [0, *sorted(inner), elements]
    return list(itertools.pairwise(edges))


def one(layout: ArenaLayout) -> tuple[CallLayout, Slab]:
    """A call with one arena, and its slab."""
    call = CallLayout([ShardLayout(0, (layout,))])
    return call, call.slabs[0]


class Assembly:
    """Slabs to come, memory for them, and the elements that are to get there."""

    def __init__(
        self,
        draw: Callable[..., Any],
        shards: Sequence[ShardLayout],
        receive: Callable[[np.ndarray, np.ndarray], bool] = copy_elements,
    ) -> None:
        layout = CallLayout(shards)
        self.memory: dict[Slab, list[SlabRange]] = {}
        self.sent: dict[Slab, np.ndarray] = {}
        for number, slab in enumerate(layout.slabs):
            self.sent[slab] = (np.arange(slab.elements) + number).astype(slab.wire_dtype)
            # As Arrival has it: memory of the variables, in as many runs as it likes.
            self.memory[slab] = [SlabRange(a, b, np.zeros(b - a, slab.dtype)) for a, b in cut(draw, slab.elements)]
        self.assembler = Assembler(layout, self.memory, receive)

    def chunks(self, draw: Callable[..., Any]) -> list[list[Chunk]]:
        """Lists of chunks, one a slab. A chunk names any arena of its slab at or before its start."""
        return [
            [self._chunk(draw, slab, start, elements[start:stop]) for start, stop in cut(draw, len(elements))]
            for slab, elements in self.sent.items()
        ]

    @staticmethod
    def _chunk(draw: Callable[..., Any], slab: Slab, start: int, elements: np.ndarray) -> Chunk:
        arena: int = draw(st.sampled_from([index for index, first in enumerate(slab.starts) if first <= start]))
        offset = (start - slab.starts[arena]) * elements.itemsize
        return Chunk(*slab.keys[arena], offset, memoryview(elements.tobytes()))

    def check_complete(self) -> None:
        for slab, elements in self.sent.items():
            got = np.concatenate([run.target for run in self.memory[slab]])
            np.testing.assert_array_equal(got, elements.astype(got.dtype))


def dealt(draw: Callable[..., Any], lists: Sequence[Sequence[Chunk]]) -> list[Chunk]:
    """The lists' items in any order."""
    chunks: list[Chunk] = draw(st.permutations([item for items in lists for item in items]))
    return chunks


class TestAssembler:
    @given(st.data(), layouts)
    def test_slabs_are_complete_for_any_chunks_runs_and_order(
        self, data: st.DataObject, shards: Sequence[ShardLayout]
    ) -> None:
        assembly = Assembly(data.draw, shards)
        for chunk in dealt(data.draw, assembly.chunks(data.draw)):
            targets = assembly.assembler.memory(chunk, len(chunk.data)) if data.draw(st.booleans()) else None
            if targets is None:
                assembly.assembler.add(chunk)
                continue
            rest = chunk.data  # as the kernel puts them there
            for target in targets:
                target[:], rest = rest[: len(target)], rest[len(target) :]
            assert not rest
            assembly.assembler.filled(chunk, len(chunk.data))
        assembly.assembler.finish()
        assembly.check_complete()
        assert assembly.assembler.non_finite == {}

    @given(st.data(), layouts.filter(lambda shards: any(shard.arenas for shard in shards)))
    def test_missing_repeated_or_moved_chunk_is_refused(
        self, data: st.DataObject, shards: Sequence[ShardLayout]
    ) -> None:
        assembly = Assembly(data.draw, shards)
        chunks = [*dealt(data.draw, assembly.chunks(data.draw))]
        index = data.draw(st.integers(0, len(chunks) - 1))
        chunk = chunks[index]
        match data.draw(st.sampled_from(["left out", "twice", "earlier", "later", "elsewhere"])):
            case "left out":
                del chunks[index]
            case "twice":
                chunks.insert(index, chunk)
            case "earlier" if chunk.offset:
                chunks[index] = Chunk(chunk.shard, chunk.arena, chunk.offset - 1, chunk.data)
            case "earlier" | "later":
                chunks[index] = Chunk(chunk.shard, chunk.arena, chunk.offset + 1, chunk.data)
            case "elsewhere":
                chunks[index] = Chunk(chunk.shard + 1, chunk.arena, chunk.offset, chunk.data)

        def put() -> None:
            for chunk in chunks:
                assembly.assembler.add(chunk)
            assembly.assembler.finish()

        with pytest.raises(errors.BadChunk, match=r"shard \d+, arena \d+: .*the call was discarded"):
            put()

    @pytest.mark.parametrize(
        ("chunk", "said"),
        [
            (Chunk(1, 0, 0, memoryview(bytes(4))), "not one of the expected arenas"),
            (Chunk(0, 1, 0, memoryview(bytes(4))), "not one of the expected arenas"),
            (Chunk(0, 0, 2, memoryview(bytes(4))), "starts at byte 2, within an element of 4 bytes"),
            (Chunk(0, 0, 2**64 - 4, memoryview(bytes(4))), "ends at byte 18446744073709551616 of 40"),
            (Chunk(0, 0, 0, memoryview(bytes(44))), "ends at byte 44 of 40"),
            (Chunk(0, 0, 0, memoryview(bytes(41))), "ends at byte 41 of 40"),
            (Chunk(0, 0, 0, memoryview(bytes(6))), "6 bytes is not a whole number of 4-byte elements"),
            (Chunk(0, 0, 0, memoryview(b"")), "0 bytes is not a whole number of 4-byte elements"),
        ],
    )
    def test_invalid_chunk_is_refused_and_memory_is_unchanged(self, chunk: Chunk, said: str) -> None:
        target = np.full(10, 7, np.float32)
        layout, slab = one(arena(10))
        assembler = Assembler(layout, {slab: [SlabRange(0, 10, target)]})
        with pytest.raises(errors.BadChunk, match=said):
            assembler.add(chunk)
        assert (target == 7).all()

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=20))
    def test_overlapping_chunk_is_refused_at_any_position(self, pieces: Sequence[tuple[int, int]]) -> None:
        target = np.zeros(10, np.float32)
        layout, slab = one(arena(10))
        assembler = Assembler(layout, {slab: [SlabRange(0, 10, target)]})
        came: set[int] = set()
        for start, count in pieces:
            elements = set(range(start, start + count))
            chunk = Chunk(0, 0, start * 4, memoryview(np.ones(count, np.float32).tobytes()))
            if max(elements) < 10 and not elements & came:
                assembler.add(chunk)
                came |= elements
            else:
                assert assembler.memory(chunk, count * 4) is None
                with pytest.raises(errors.BadChunk, match=r"overlaps|ends at byte"):
                    assembler.add(chunk)
            assert {*np.flatnonzero(target)} == came
        missing = set(range(10)) - came
        if missing:
            with pytest.raises(errors.BadChunk, match=f"after {len(came) * 4} of 40 bytes; byte {min(missing) * 4} is"):
                assembler.finish()
        else:
            assembler.finish()

    def test_gaps_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(framing, "MAX_PIECES", 3)
        layout, slab = one(arena(100))
        assembler = Assembler(layout, {slab: [SlabRange(0, 100, np.zeros(100, np.float32))]})
        for start in range(0, 24, 8):
            assembler.add(Chunk(0, 0, start, memoryview(bytes(4))))
        with pytest.raises(errors.BadChunk, match="more than 3 gaps"):
            assembler.add(Chunk(0, 0, 24, memoryview(bytes(4))))

    def test_assembler_that_expects_nothing_is_complete(self) -> None:
        assembler = Assembler(CallLayout([]), {})
        assembler.finish()
        assert assembler.non_finite == {}
        with pytest.raises(errors.BadChunk, match="not one of the expected arenas"):
            assembler.add(Chunk(0, 0, 0, memoryview(bytes(4))))

    @pytest.mark.parametrize("size", [1, 3, 10])
    def test_the_first_element_of_a_slab_that_is_not_finite_is_remembered(self, size: int) -> None:
        """Wherever it lies: in whatever chunk, in whatever run."""
        elements = np.arange(10, dtype=np.float32)
        elements[[6, 8]] = np.nan, np.inf
        runs = [SlabRange(0, 5, np.empty(5, np.float32)), SlabRange(5, 10, np.empty(5, np.float32))]

        def receive(target: np.ndarray, source: np.ndarray) -> bool:
            copy_elements(target, source)
            return bool(np.isfinite(target).all())

        layout, slab = one(arena(10))
        assembler = Assembler(layout, {slab: runs}, receive)
        for start in range(0, 10, size):
            data = memoryview(elements[start : start + size].tobytes())
            assembler.add(Chunk(0, 0, start * 4, data))
        assembler.finish()
        assert assembler.non_finite == {slab: 6}

    def test_elements_written_by_the_kernel_are_checked(self) -> None:
        target = np.array([0, 1, np.nan, np.inf], np.float32)
        layout, slab = one(arena(4))
        assembler = Assembler(
            layout, {slab: [SlabRange(0, 4, target)]}, accept=lambda elements: bool(np.isfinite(elements).all())
        )
        assembler.filled(Chunk(0, 0, 0, memoryview(b"")), 16)
        assembler.finish()
        assert assembler.non_finite == {slab: 2}

    def test_kernel_does_not_convert_or_scatter_widely(self) -> None:
        layout, slab = one(arena(4, "float32", wire="float16"))
        halves = Assembler(layout, {slab: [SlabRange(0, 4, np.zeros(4, np.float32))]})
        assert halves.memory(Chunk(0, 0, 0, memoryview(b"")), 8) is None
        runs = [SlabRange(index, index + 1, np.zeros(1, np.float32)) for index in range(65)]
        layout, slab = one(arena(65))
        scattered = Assembler(layout, {slab: runs})
        targets = scattered.memory(Chunk(0, 0, 0, memoryview(b"")), 64 * 4)
        assert targets
        assert len(targets) == 64
        assert scattered.memory(Chunk(0, 0, 0, memoryview(b"")), 65 * 4) is None

    @pytest.mark.parametrize("shift", range(1, 8))
    def test_chunks_may_lie_at_any_byte(self, shift: int) -> None:
        """Within a message, chunks have any alignment."""
        for dtype in DTYPES:
            elements = np.arange(9).astype(dtype)
            message = bytes(shift) + elements.tobytes()
            target = np.zeros(9, dtype)
            layout, slab = one(arena(9, dtype))
            assembler = Assembler(layout, {slab: [SlabRange(0, 9, target)]})
            assembler.add(Chunk(0, 0, 0, memoryview(message)[shift:]))
            assembler.finish()
            np.testing.assert_array_equal(target, elements)

    @pytest.mark.parametrize("wire", ["float16", "bfloat16"])
    def test_halves_of_the_wire_are_widened(self, wire: str) -> None:
        layout, slab = one(arena(4, "float32", wire=wire))
        target = np.zeros(4, np.float32)
        sent = np.array([1, -2.5, np.inf, 2**-10], slab.wire_dtype)
        assembler = Assembler(layout, {slab: [SlabRange(0, 4, target)]})
        assembler.add(Chunk(0, 0, 0, memoryview(sent.tobytes())))
        assembler.finish()
        np.testing.assert_array_equal(target, sent.astype(np.float32))


class TestMessages:
    @given(st.lists(st.integers(1, CHUNK_BYTES // 16).map(lambda size: size * 16) | st.just(CHUNK_BYTES), max_size=30))
    def test_messages_keep_the_order_and_hold_at_most_about_one_chunk(self, sizes: list[int]) -> None:
        block = memoryview(bytes(CHUNK_BYTES))
        chunks = [Chunk(0, 0, index, block[:size]) for index, size in enumerate(sizes)]
        groups = [*messages(chunks)]
        assert [chunk for group in groups for chunk in group] == chunks
        assert all(groups)
        for group, following in itertools.pairwise(groups):
            size = sum(len(chunk.data) for chunk in group)
            assert size <= CHUNK_BYTES
            # None is sent half empty if the next chunk would have fitted.
            assert size + len(following[0].data) + 64 * len(group) > CHUNK_BYTES

    def test_many_tiny_chunks_do_not_make_a_message_too_large(self) -> None:
        block = memoryview(bytes(4))
        groups = [*messages(Chunk(0, 0, index, block) for index in range(50_000))]
        assert all(len(group) * (64 + 4) <= CHUNK_BYTES + 64 for group in groups)
        assert sum(map(len, groups)) == 50_000

"""Sources of `shoal.data`: the contract that all fulfil, and the arrays that each makes from its files."""

import csv
import datetime
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.program import BlockDataset, Blocks, Dataset
from shoal_worker.batches import order_of
from support.run_lengths import draws

ROWS = 97
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = RNG.integers(-5, 5, ROWS)
NAMES = np.array([f"name, {number}\n“{number % 7}”" for number in range(ROWS)], object)


def table() -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 3)
    return pa.table({"x": lists, "y": Y, "name": pa.array(NAMES)})


def readers() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@dataclass
class Case:
    """A source, and the same rows as plain NumPy."""

    dataset: Any
    expected: dict[str, np.ndarray] = field(default_factory=lambda: {"x": X, "y": Y})

    def check(self, batch: Mapping[str, np.ndarray], numbers: np.ndarray) -> None:
        assert batch.keys() == self.expected.keys()
        for name, array in self.expected.items():
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array[numbers])


class Reads:
    def __len__(self) -> int:
        return ROWS

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {"x": X[start:stop], "y": Y[start:stop]}


class Iterates:
    def __len__(self) -> int:
        return ROWS

    def iterate(self, start: int) -> Iterator[dict[str, np.ndarray]]:
        for number in range(start, ROWS):
            yield {"x": X[number], "y": Y[number]}


def memory(_: Path) -> Case:
    return Case(shoal.data.Arrays({"x": X, "y": Y}))


def npy(folder: Path) -> Case:
    np.save(folder / "x.npy", X)
    return Case(shoal.data.Arrays({"x": folder / "x.npy", "y": Y}))


def npz(folder: Path) -> Case:
    np.savez(folder / "both.npz", x=X, y=Y)
    return Case(shoal.data.Arrays(str(folder / "both.npz")))


def compressed(folder: Path) -> Case:
    np.savez_compressed(folder / "both.npz", x=np.asfortranarray(X), y=Y)
    return Case(shoal.data.Arrays(folder / "both.npz"))


def parquet(folder: Path, **options: Any) -> Case:
    options = {"columns": ["y", "x", "name"], **options}
    rows = table()
    pq.write_table(rows.slice(0, 40), folder / "a.parquet", row_group_size=11)
    pq.write_table(rows.slice(0, 0), folder / "b.parquet")
    pq.write_table(rows.slice(40), folder / "c.parquet", row_group_size=30)
    return Case(shoal.data.Parquet(folder, **options), {"y": Y, "x": X, "name": NAMES})


def parts(folder: Path) -> Case:
    return parquet(folder, block_bytes=340, window=3)


def in_order(folder: Path) -> Case:
    return parquet(folder, window=0, prefetch=0)


def comma_separated(folder: Path, **options: Any) -> Case:
    for name, rows in (("a", slice(0, 40)), ("b", slice(40, None))):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            lines = csv.writer(file, lineterminator="\r\n" if name == "a" else "\n")
            lines.writerow(["y", "x0", "name"])
            lines.writerows(zip(Y[rows], X[rows, 0], NAMES[rows], strict=True))
    types = {"x0": "float32"}
    return Case(shoal.data.Csv(folder, types=types, **options), {"y": Y, "x0": X[:, 0], "name": NAMES})


def csv_blocks(folder: Path) -> Case:
    return comma_separated(folder, block_bytes=100, window=2)


def reads(_: Path) -> Case:
    return Case(shoal.data.Seekable(Reads(), block=10))


def iterates(_: Path) -> Case:
    return Case(shoal.data.Seekable(Iterates(), block=13, window=4))


SOURCES = [memory, npy, npz, compressed, parquet, parts, in_order, comma_separated, csv_blocks, reads, iterates]


@pytest.fixture(params=SOURCES, ids=lambda source: source.__name__)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    yield request.param(tmp_path)
    assert not readers()


class TestEverySource:
    def test_is_a_data_set_of_so_many_samples(self, case: Case) -> None:
        assert isinstance(case.dataset, Dataset)
        assert len(case.dataset) == ROWS
        blocks = getattr(case.dataset, "blocks", None)
        assert isinstance(case.dataset, BlockDataset) is isinstance(blocks, Blocks)

    def test_gives_the_samples_that_are_asked_for(self, case: Case) -> None:
        rng = np.random.default_rng(1)
        for numbers in (np.arange(ROWS), rng.permutation(ROWS), rng.integers(0, ROWS, 300), np.array([ROWS - 1])):
            case.check(case.dataset.batch(numbers), numbers)

    def test_has_no_sample_but_its_own(self, case: Case) -> None:
        with pytest.raises(IndexError):
            case.dataset.batch(np.array([0, ROWS]))

    def test_every_sample_occurs_once_in_an_epoch(self, case: Case) -> None:
        for epoch in range(2):
            seen = np.zeros(ROWS, int)
            pieces = list(order_of(case.dataset, 7).numbers(epoch, 0, ROWS))
            for start in range(0, ROWS, 20):
                plan = np.array_split(np.concatenate(pieces)[start : start + 20], 6)
                plan = [numbers for numbers in plan if len(numbers)]
                batches = [*self.read(case.dataset, plan)]
                for batch, numbers in zip(batches, plan, strict=True):
                    case.check(batch, numbers)
                    np.add.at(seen, numbers, 1)
            assert (seen == 1).all()

    def test_reading_may_be_abandoned(self, case: Case) -> None:
        plan = [np.arange(start, start + 8) for start in range(0, 80, 8)]
        reading = self.read(case.dataset, plan)
        case.check(next(reading), plan[0])
        reading.close()
        assert not readers()
        case.check(case.dataset.batch(plan[9]), plan[9])

    @staticmethod
    def read(dataset: Any, plan: list[np.ndarray]) -> Generator[dict[str, np.ndarray], None, None]:
        if isinstance(dataset, BlockDataset):
            yield from dataset.batches(plan)
        else:
            yield from (dataset.batch(numbers) for numbers in plan)


# Arrays.


def test_batch_has_the_structure_of_the_arrays() -> None:
    pair = namedtuple("pair", "left right")
    numbers = np.array([3, 1])
    np.testing.assert_array_equal(shoal.data.Arrays(Y).batch(numbers), Y[numbers])
    first, second = shoal.data.Arrays((X, [Y, {"z": Y}])).batch(numbers)
    np.testing.assert_array_equal(first, X[numbers])
    assert second[1].keys() == {"z"}
    assert shoal.data.Arrays(pair(X, Y)).batch(numbers).right.tolist() == Y[numbers].tolist()


def test_files_are_mapped_and_not_read(tmp_path: Path) -> None:
    """What is written to a file later is in the batches. They are plain arrays."""
    new = X + 1
    np.savez(tmp_path / "big.npz", x=X, f=np.asfortranarray(X))
    np.save(tmp_path / "x.npy", X)
    for path, count in ((tmp_path / "x.npy", 1), (tmp_path / "big.npz", 2)):
        arrays, content = shoal.data.Arrays(path), path.read_bytes()
        for old_bytes, new_bytes in [(X.tobytes(), new.tobytes()), (X.T.tobytes(), new.T.tobytes())][:count]:
            with path.open("r+b") as file:
                file.seek(content.index(old_bytes))
                file.write(new_bytes)
        batch = arrays.batch(np.array([1]))
        for array in (batch,) if count == 1 else batch.values():
            np.testing.assert_array_equal(array, new[[1]])
            assert type(array) is np.ndarray


# Parquet.

COLUMNS = {
    "int8": pa.array([1, -2, 3], pa.int8()),
    "uint64": pa.array([1, 2, 2**64 - 1], pa.uint64()),
    "half": pa.array(np.array([1, 2, 3], np.float16)),
    "double": pa.array([1.0, np.nan, 3.0]),
    "bool": pa.array([True, False, True]),
    "day": pa.array([datetime.date(2020, 1, day) for day in (1, 2, 3)]),
    "time": pa.array([1, 2, 3], pa.timestamp("us")),
    "span": pa.array([1, 2, 3], pa.duration("ms")),
    "text": pa.array(["a", "", "é"]),
    "bytes": pa.array([b"a", b"\0", b""]),
    "fixed": pa.array([b"ab", b"\0\0", b"cd"], pa.binary(2)),
    "dictionary": pa.array(["u", "v", "u"]).dictionary_encode(),
    "list": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
    "lists": pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int32(), 2), 1)),
}
EXPECTED: dict[str, np.ndarray] = {
    "int8": np.array([1, -2, 3], np.int8),
    "uint64": np.array([1, 2, 2**64 - 1], np.uint64),
    "half": np.array([1, 2, 3], np.float16),
    "double": np.array([1.0, np.nan, 3.0]),
    "bool": np.array([True, False, True]),
    "day": np.array(["2020-01-01", "2020-01-02", "2020-01-03"], "datetime64[D]"),
    "time": np.array([1, 2, 3], "datetime64[us]"),
    "span": np.array([1, 2, 3], "timedelta64[ms]"),
    "text": np.array(["a", "", "é"], object),
    "bytes": np.array([b"a", b"\0", b""], object),
    "fixed": np.array([[97, 98], [0, 0], [99, 100]], np.uint8),
    "dictionary": np.array(["u", "v", "u"], object),
    "list": np.array([[1, 2], [3, 4], [5, 6]], np.int32),
    "lists": np.array([[[1, 2]], [[3, 4]], [[5, 6]]], np.int32),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("window", [0, 1])
def test_columns_become_arrays(name: str, window: int, tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": COLUMNS[name]}), tmp_path / "t.parquet")
    dataset = shoal.data.Parquet(tmp_path / "t.parquet", window=window)
    for numbers in (np.arange(3), np.array([2, 0]), np.array([1, 2])):
        found, expected = dataset.batch(numbers)["c"], EXPECTED[name][numbers]
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_tensor_has_its_shape(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    pq.write_table(pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)}), tmp_path / "t.parquet")
    np.testing.assert_array_equal(shoal.data.Parquet(tmp_path).batch(np.array([3, 1]))["t"], values[[3, 1]])


def test_rows_in_order_are_not_copied(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": X[:, 0], "l": table()["x"]}), tmp_path / "t.parquet")
    dataset = shoal.data.Parquet(tmp_path, window=0, prefetch=0)
    first, second = dataset.batches([np.arange(0, 10), np.arange(10, 20)])
    for name in ("x", "l"):
        assert not first[name].flags.owndata
        assert not first[name].flags.writeable
        gap = second[name].ctypes.data - first[name].ctypes.data
        assert gap == first[name].nbytes, "the two are not views of one block"


def test_nulls_are_replaced_by_the_given_fill(tmp_path: Path) -> None:
    rows = pa.table(
        {
            "y": pa.array([1, None, 3]),
            "name": pa.array(["a", None, None]),
            "list": pa.array([[1, None], [None, 4], [5, 6]], pa.list_(pa.int32(), 2)),
        }
    )
    pq.write_table(rows, tmp_path / "t.parquet")
    fill = {"y": -1, "name": "?", "list": 0}
    batch = shoal.data.Parquet(tmp_path, fill=fill).batch(np.arange(3))
    assert batch["y"].tolist() == [1, -1, 3]
    assert batch["y"].dtype == np.int64
    assert batch["name"].tolist() == ["a", "?", "?"]
    assert batch["list"].tolist() == [[1, 0], [0, 4], [5, 6]]


def test_blocks_are_row_groups_and_parts_of_large_ones(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(100.0)}), tmp_path / "a.parquet", row_group_size=30)
    pq.write_table(pa.table({"x": np.arange(100.0, 107)}), tmp_path / "b.parquet")
    whole = shoal.data.Parquet(tmp_path).blocks
    assert whole.starts.tolist() == [0, 30, 60, 90, 100, 107]
    assert whole.runs.tolist() == [0, 1, 2, 3, 4, 5]
    parts = shoal.data.Parquet(tmp_path, block_bytes=13 * 8).blocks
    assert parts.starts.tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 107]
    assert parts.runs.tolist() == [0, 3, 6, 9, 10, 11]
    rows = shoal.data.Parquet(tmp_path, block_bytes=1)
    assert len(rows.blocks) == 107
    np.testing.assert_array_equal(rows.batch(np.arange(107)[::-1])["x"], np.arange(107.0)[::-1])


def test_run_in_several_parts_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": np.arange(1000.0)}), tmp_path / "a.parquet", row_group_size=250)
    dataset = shoal.data.Parquet(tmp_path, block_bytes=25 * 8, window=3)
    begun: list[int] = []
    read_blocks = dataset.read_blocks

    def record_and_read(first: int, stop: int) -> Any:
        begun.append(first)
        return read_blocks(first, stop)

    monkeypatch.setattr(dataset, "read_blocks", record_and_read)
    [*pieces] = order_of(dataset, 1).numbers(0, 0, 1000)
    numbers = np.concatenate(pieces)
    found = np.concatenate([batch["x"] for batch in dataset.batches(np.array_split(numbers, 77))])
    np.testing.assert_array_equal(found, numbers)
    assert sorted(begun) == [0, 10, 20, 30]


# CSV.


@st.composite
def csv_texts(draw: Callable[..., Any]) -> tuple[str, list[tuple[int, str]]]:
    """A file, and its rows."""
    value = st.text(st.sampled_from('ab,"\n é'), max_size=4)
    rows = draw(st.lists(st.tuples(st.integers(-9, 99), value), min_size=1, max_size=30))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    lines = []
    for number, text in rows:
        quoted = '"' + text.replace('"', '""') + '"'
        plain = text and not set(text) & set(',"\n')
        lines.append(f"{number},{text if plain and draw(st.booleans()) else quoted}")
        lines += [""] * draw(st.integers(0, 2))
    text = end.join(["", "n,t", *lines] if draw(st.booleans()) else ["n,t", *lines])
    return text + end * draw(st.integers(0, 1)), rows


@given(csv_texts(), st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=draws(60))
def test_csv_rows_with_any_text_are_read(
    given: tuple[str, Sequence[tuple[int, str]]], block_bytes: int, chunk: int
) -> None:
    text, rows = given
    system = fsspec.filesystem("memory")
    system.pipe("/t.csv", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.data._csv_index.CHUNK_BYTES", chunk)
        types = {"n": "int16", "t": "string"}
        dataset = shoal.data.Csv("memory://t.csv", types=types, block_bytes=block_bytes, prefetch=0)
    batch = dataset.batch(np.arange(len(dataset)))
    assert list(zip(batch["n"].tolist(), batch["t"].tolist(), strict=True)) == rows


def test_csv_without_header_other_delimiters_and_without_quotes(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text('1\t5"\n2\t"6\n')
    dataset = shoal.data.Csv(tmp_path, names=["n", "size"], delimiter="\t", quote="")
    batch = dataset.batch(np.arange(2))
    assert (batch["n"].tolist(), batch["size"].tolist()) == ([1, 2], ['5"', '"6'])


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfn,m\n1,2\n")
    assert shoal.data.Csv(tmp_path).batch(np.array([0])).keys() == {"n", "m"}


def test_empty_values_are_filled(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n,m,t\n1,0.5,a\n,,\n3,1.5,\n")
    batch = shoal.data.Csv(tmp_path, fill={"n": 7, "m": -0.5}).batch(np.arange(3))
    assert (batch["n"].tolist(), batch["m"].tolist(), batch["t"].tolist()) == (
        [1, 7, 3],
        [0.5, -0.5, 1.5],
        ["a", "", ""],
    )


def test_csv_is_as_arrow_reads_it(tmp_path: Path) -> None:
    rows = pa.table({"a": np.arange(5000), "b": RNG.normal(size=5000), "c": RNG.integers(0, 2, 5000).astype(bool)})
    pyarrow.csv.write_csv(rows, tmp_path / "t.csv")
    dataset = shoal.data.Csv(tmp_path / "t.csv", columns=["c", "a", "b"], block_bytes=4096)
    assert len(dataset.blocks) > 10
    numbers = np.random.default_rng(3).permutation(5000)
    batch = dataset.batch(numbers)
    for name in "abc":
        np.testing.assert_array_equal(batch[name], rows[name].to_numpy()[numbers])


# Files.


@pytest.fixture
def far() -> Iterator[MemoryFileSystem]:
    """Files on a file system that is no disk's."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for number, name in enumerate(["b", "a", "c"]):
        with system.open(f"/data/{name}.parquet", "wb") as file:
            pq.write_table(pa.table({"x": np.arange(10) + 10 * number}), file, row_group_size=4)
    system.pipe("/data/_SUCCESS", b"")
    system.pipe("/data/t.csv", b"n\n1\n2\n")
    yield system
    system.store.clear()


@pytest.mark.parametrize(
    "where",
    ["memory://data", "memory://data/*.parquet", [f"memory://data/{name}.parquet" for name in "cab"]],
    ids=["folder", "pattern", "list"],
)
def test_files_of_any_file_system_are_read_by_name(far: MemoryFileSystem, where: str | list[str]) -> None:
    dataset = shoal.data.Parquet(where)
    assert dataset.batch(np.arange(30))["x"].tolist() == [*range(10, 20), *range(10), *range(20, 30)]
    assert shoal.data.Csv("memory://data").batch(np.arange(2))["n"].tolist() == [1, 2]


def open_files() -> list[Path]:
    """The files that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found.append(descriptor.readlink())
    return found


def test_more_files_than_stay_open_are_read(tmp_path: Path) -> None:
    for number in range(40):
        pq.write_table(pa.table({"x": [number, number]}), tmp_path / f"{number:02}.parquet")
    dataset = shoal.data.Parquet(f"{tmp_path}/*.parquet", window=30)
    numbers = np.random.default_rng(0).permutation(80)
    np.testing.assert_array_equal(dataset.batch(numbers)["x"], numbers // 2)
    assert 0 < sum(path.is_relative_to(tmp_path) for path in open_files()) <= 16


def test_folder_is_searched_except_for_hidden_files(tmp_path: Path) -> None:
    for name in ("sub/b.parquet", "a.parquet", "_old/c.parquet", ".d.parquet", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"x": [name]}), path)
    assert shoal.data.Parquet(tmp_path).batch(np.arange(2))["x"].tolist() == ["a.parquet", "sub/b.parquet"]
    only = shoal.data.Parquet(tmp_path / "e.txt")
    assert only.batch(np.array([0]))["x"].tolist() == ["e.txt"]


@pytest.mark.parametrize("package", ["pyarrow", "fsspec"])
def test_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"shoal\.data\.Parquet.* needs {package}.*pip install 'shoal\[data\]'"):
        shoal.data.Parquet("memory://data")

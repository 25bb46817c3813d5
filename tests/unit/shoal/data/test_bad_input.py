"""Errors about missing, damaged or unexpected data: they name the file and the problem, and say what to do."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal import errors
from shoal.data import Arrays, Csv, Parquet, Seekable

X = np.arange(1000.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def refused(said: str) -> pytest.RaisesExc:
    return pytest.raises(errors.InvalidData, match=said)


def parquet(path: Path, rows: dict[str, Any] | None = None, **options: Any) -> None:
    pq.write_table(pa.table({"x": X, "y": X} if rows is None else rows), path, **options)


# Files.


@pytest.mark.parametrize("source", [Parquet, Csv])
def test_missing_files_are_refused(source: type[Csv] | type[Parquet], folder: Path) -> None:
    with refused(rf"shoal.data.{source.__name__}: there is no file at {folder}/none; check the path"):
        source(folder / "none")
    with refused("there is no file at .*/none-\\*"):
        source(f"{folder}/none-*")
    with refused("there is no file at memory://nowhere"):
        source("memory://nowhere")
    with refused("given no files"):
        source([])
    with refused("there is no file at"):
        source(folder)


def test_file_named_twice_is_refused(folder: Path) -> None:
    parquet(folder / "a.parquet")
    with refused(r"a\.parquet is named twice"):
        Parquet([folder, folder / "a.parquet"])


def test_unknown_protocol_is_refused() -> None:
    with refused("gopher://x cannot be read: Protocol not known: gopher"):
        Parquet("gopher://x")
    with refused("github://x cannot be read: .*missing"):
        Parquet("github://x")


@pytest.mark.parametrize(("source", "name"), [(Parquet, "a.parquet"), (Csv, "a.csv"), (Arrays, "a.npy")])
def test_empty_file_is_refused(source: type[Arrays] | type[Csv] | type[Parquet], name: str, folder: Path) -> None:
    (folder / name).touch()
    with refused(rf"{name} is empty.*write it again"):
        source(str(folder / name))


# Parquet.


def test_truncated_parquet_file_is_refused(folder: Path) -> None:
    parquet(folder / "a.parquet")
    path = folder / "b.parquet"
    for length in (3, 1000, len((folder / "a.parquet").read_bytes()) - 1):
        path.write_bytes((folder / "a.parquet").read_bytes()[:length])
        with refused(r"b\.parquet cannot be read: .*; it may be damaged or truncated"):
            Parquet(folder)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_damaged_row_group_is_refused(folder: Path, prefetch: int) -> None:
    path = folder / "a.parquet"
    parquet(path, row_group_size=500, compression="snappy", use_dictionary=False, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start + 40 : start + 60] = bytes(20)
    path.write_bytes(content)
    dataset = Parquet(path, prefetch=prefetch)
    plan = [np.arange(0, 100), np.arange(450, 550)]
    reading = dataset.batches(plan)
    assert next(reading)["x"].tolist() == X[:100].tolist()
    with refused(r"a\.parquet, row group 1 cannot be read: .*copy it again"):
        next(reading)


def test_parquet_file_that_changes_or_disappears_is_refused(folder: Path) -> None:
    parquet(folder / "a.parquet")
    parquet(folder / "b.parquet")
    dataset = Parquet(folder)
    parquet(folder / "a.parquet", {"x": X[:5], "y": X[:5]})
    with refused(r"a\.parquet, row group 0 has changed"):
        dataset.batch(np.array([0]))
    (folder / "b.parquet").unlink()
    with refused(r"b\.parquet.* does not exist \(any more\)"):
        dataset.batch(np.array([1500]))


def test_missing_columns_are_refused(folder: Path) -> None:
    parquet(folder / "a.parquet", {"height": X, "label": X})
    with refused(r"a\.parquet has no column 'heights_'; did you mean height\?"):
        Parquet(folder, columns=["heights_"])
    with refused(r"has no column 'z'; it has height, label"):
        Parquet(folder, columns=["z"])
    with refused("column 'label' occurs twice"):
        Parquet(folder, columns=["label", "label"])
    with refused("there are no columns to read"):
        Parquet(folder, columns=[])


def test_files_with_different_schemas_are_refused(folder: Path) -> None:
    parquet(folder / "a.parquet")
    parquet(folder / "b.parquet", {"x": X.astype(np.float32), "z": X})
    with refused(
        r"b\.parquet: column 'x' is of type float, but of type double in the first file; write the files alike"
    ):
        Parquet(folder, columns=["x"])
    with refused(r"b\.parquet: column 'y' is missing"):
        Parquet(folder, columns=["y"])


def test_data_without_rows_is_refused(folder: Path) -> None:
    parquet(folder / "a.parquet", {"x": X[:0]})
    with refused("a.parquet and all other files have no rows"):
        Parquet(folder)
    (folder / "a.csv").write_text("x,y\n\n")
    with refused("a.csv and all other files have no rows"):
        Csv(folder)
    with refused("arrays without rows"):
        Arrays(X[:0])


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        (pa.array([[1], [2, 3]]), r"list_\(type, size\)"),
        (pa.array([{"a": 1}] * 2), "write its parts as columns"),
        (pa.array([Decimal(1), Decimal(2)], pa.decimal128(20, 2)), "float64"),
        (pa.array([None, None]), "nothing but nulls"),
        (pa.array([1, 2], pa.time64("us")), "a timestamp"),
        (pa.array([["a"], ["b"]], pa.list_(pa.string(), 1)), "needs numbers"),
    ],
)
def test_types_without_an_array_form_are_refused(folder: Path, column: pa.Array, advice: str) -> None:
    parquet(folder / "a.parquet", {"x": X[:2], "odd": column})
    with refused(rf"a\.parquet: column 'odd' is of type .*{advice}.*columns="):
        Parquet(folder)
    assert Parquet(folder, columns=["x"]).batch(np.array([1]))["x"] == 1


def test_nulls_without_a_fill_are_refused(folder: Path) -> None:
    parquet(folder / "a.parquet", {"x": [1, None, 3]})
    with refused(r"a\.parquet, row group 0: column 'x' has 1 nulls among 3 values.*give fill=\{'x': \.\.\.\}"):
        Parquet(folder).batch(np.array([0]))
    parquet(folder / "a.parquet", {"l": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))})
    # pyarrow before 26 cannot read a list of fixed length that is null.
    with refused("column 'l' has 1 nulls among 2 values|Expected all lists to be of size=2"):
        Parquet(folder, fill={"l": 0}).batch(np.array([0]))


def test_fills_that_match_no_column_are_refused(folder: Path) -> None:
    parquet(folder / "a.parquet")
    with refused("fill has a value for 'z', which is not one of the columns"):
        Parquet(folder, fill={"z": 0})
    with refused("fill of column 'x' is 'none', which is not a double"):
        Parquet(folder, fill={"x": "none"})


def test_invalid_prefetch_and_window_are_refused(folder: Path) -> None:
    wrong: Any = "a lot"
    parquet(folder / "a.parquet")
    with refused("prefetch is 'a lot'"):
        Parquet(folder, prefetch=wrong)
    with pytest.raises(errors.ProgramError, match="window is -1"):
        Parquet(folder, window=-1)


# CSV.


def csv(folder: Path, text: str, name: str = "a.csv", **options: Any) -> Csv:
    (folder / name).write_text(text)
    return Csv(folder, **options)


@pytest.mark.parametrize("block_bytes", [4, 1000])
@pytest.mark.parametrize(("row", "said"), [("5", "1 value"), ("5,6,7", "3 values")])
def test_csv_row_of_the_wrong_length_is_refused(folder: Path, block_bytes: int, row: str, said: str) -> None:
    with refused(rf"a\.csv: row 3 has {said} instead of 2: '{row}'; correct it"):
        csv(folder, f"n,m\n1,2\n3,4\n{row}\n7,8\n", block_bytes=block_bytes).batch(np.arange(4))


def test_value_of_the_wrong_type_is_refused(folder: Path) -> None:
    dataset = csv(folder, "n\n1\n2\nfew\n4\n", block_bytes=4)
    with refused(r"a\.csv, rows 2 to 3: .*conversion error to int64: invalid value 'few'; .*types="):
        dataset.batch(np.arange(4))
    assert csv(folder, "n\n1\n2\nfew\n4\n", block_bytes=4, types={"n": "string"}).batch(np.array([2]))["n"] == "few"


def test_missing_value_is_refused(folder: Path) -> None:
    with refused(r"a\.csv, rows 1 to 3: column 'n' has 1 nulls"):
        csv(folder, "n,m\n1,1\n,2\n3,3\n").batch(np.array([0]))


def test_unclosed_quote_is_refused(folder: Path) -> None:
    with refused(r"a\.csv: a quote is not closed at the file's end"):
        csv(folder, 'n,t\n1,"a\n2,b\n')


def test_files_with_different_headers_are_refused(folder: Path) -> None:
    (folder / "b.csv").write_text("m,n\n1,2\n")
    with refused(r"b\.csv has the columns m, n, but .*a\.csv has n, m; write the files alike"):
        csv(folder, "n,m\n1,2\n")


def test_csv_that_is_compressed_or_disappears_is_refused(folder: Path) -> None:
    (folder / "a.csv.gz").write_bytes(b"\x1f\x8b")
    with refused(r"a\.csv\.gz is compressed.*unpack it"):
        Csv(folder / "a.csv.gz")
    dataset = csv(folder, "n,m\n1,2\n")
    (folder / "a.csv").unlink()
    with refused(r"a\.csv does not exist"):
        dataset.batch(np.array([0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ["z"]}, "has no column 'z'; it has n, m"),
        ({"types": {"z": "int8"}}, "types has a type for 'z'"),
        ({"types": {"n": "number"}}, "'number' of column 'n' is not an Arrow type"),
        ({"delimiter": ",,"}, "delimiter is ',,'; give one"),
        ({"quote": "é"}, "quote is 'é'; give one"),
        ({"block_bytes": 0}, "block_bytes is 0; give a whole number, 1 or more"),
    ],
)
def test_invalid_csv_arguments_are_refused(folder: Path, options: dict[str, Any], said: str) -> None:
    with refused(said):
        csv(folder, "n,m\n1,2\n", **options)


# Arrays and what can be sought.


def test_numpy_files_that_are_damaged_or_hold_objects_are_refused(folder: Path) -> None:
    whole = io.BytesIO()
    np.save(whole, X)
    (folder / "short.npy").write_bytes(whole.getvalue()[:-1])
    (folder / "text.npy").write_text("1,2,3")
    np.save(folder / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(folder / "objects.npz", x=np.array([{}], object))
    np.savez_compressed(folder / "objects2.npz", x=np.array([{}], object))
    for name in ("short.npy", "text.npy", "objects.npy", "objects.npz", "objects2.npz"):
        with refused(name.replace(".", r"\.")):
            Arrays(folder / name)
    with refused(r"none\.npy does not exist"):
        Arrays(folder / "none.npy")
    with refused("cannot be mapped"):
        Arrays("s3://bucket/x.npy")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": X, "y": X[:5]}, r"different lengths \(\['x'\]: 1000, \['y'\]: 5\)"),
        ({"x": [1, 2]}, r"Arrays\['x'\]\[0\] is a int; give an array"),
        ((X, np.float32(3)), r"Arrays\[1\] is a float32"),
        ((X, np.array(3)), r"Arrays\[1\] is an array without dimensions"),
        ({}, "is empty"),
        (None, "is a NoneType"),
    ],
)
def test_values_that_are_not_arrays_are_refused(
    given: tuple[np.ndarray, np.ndarray] | Mapping[str, np.ndarray | list[int]] | None, said: str
) -> None:
    with refused(said):
        Arrays(given)


class Sought:
    def __init__(self, length: int, read: Callable[[], Any]) -> None:
        self.length, self.read = length, read

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda start, stop: X[start : stop - 1], r"Sought returned for the samples 0 to 9 has 9 rows; return 10"),
        (lambda start, stop: {"a": X[start:stop], "b": X}, "arrays of different lengths"),
        (lambda start, stop: None, "is a NoneType"),
        (lambda start, stop: {f"from {start}": X[start:stop]}, r"has the arrays .*from 10.* but earlier blocks had"),
    ],
)
def test_source_with_invalid_blocks_is_refused(read: Callable[..., Any], said: str) -> None:
    with refused(said):
        Seekable(Sought(100, read), block=10, window=2).batch(np.arange(20))


def test_object_that_is_not_a_source_is_refused() -> None:
    with refused(r"needs a source with len\(\).*a list lacks them"):
        Seekable([1, 2])
    with refused("has no samples"):
        Seekable(Sought(0, print))
    with refused("block is 0"):
        Seekable(Sought(3, print), block=0)

    class Ends:
        def __len__(self) -> int:
            return 10

        def iterate(self, start: int) -> Iterator[int]:
            return iter(range(start, 7))

    with refused(re.escape("Ends.iterate(5) ended after 2 samples")):
        Seekable(Ends(), block=5).batch(np.array([9]))

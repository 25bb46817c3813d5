"""`wide_and_deep`: training on a table, its metrics, and the errors about unsuitable tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shoal
from shoal import errors
from shoal.program import BlockDataset
from shoal_nn import Supervised
from shoal_nn.programs import wide_and_deep
from support.programs.model_data import pairs
from support.programs.model_steps import check_begin, check_step, trained


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tables")
    return {"data": pairs(folder / "train.parquet", 1000, 2), "held_out": pairs(folder / "test.parquet", 300, 3)}


CATEGORIES = {"a": 12, "b": 12, "flag": 2}


def wide(tables: Mapping[str, str], **settings: Any) -> Supervised:
    wanted = {"label": "label", "categories": CATEGORIES, "numbers": ["rate"], "hidden": [4], "embedding": 2}
    return wide_and_deep(**{**tables, **wanted, **settings})


def test_a_table_is_read_in_blocks_and_takes_a_step(tables: dict[str, str]) -> None:
    program = wide(tables, numbers={"age": [50, 20], "rate": [0, 1]}, crosses=[["a", "b"]])
    assert isinstance(program.dataset, BlockDataset)
    assert program.dataset.blocks.window == 8
    [first, second] = program.dataset.batches(iter([np.arange(3), np.arange(3, 8)]))
    assert [len(batch["label"]) for batch in (first, second)] == [3, 5]
    assert np.abs(second["age"]).max() < 2
    np.testing.assert_array_equal(second["age"], program.dataset.batch(np.arange(3, 8))["age"])
    step = check_step(program, check_begin(program), first)
    assert float(step.loss) == pytest.approx(np.log(2), abs=0.5)


def test_a_cross_learns_more_than_its_categories_alone(tables: dict[str, str]) -> None:
    settings = {"hidden": [1], "embedding": 1}  # so that its deep part does not either
    with_cross, without = wide(tables, crosses=[["a", "b"]], **settings), wide(tables, **settings)
    best, other = (shoal.evaluate(it, trained(it, 60, 4.0, batch=256))["auc"] for it in (with_cross, without))
    assert best > 0.9
    assert other < 0.7


def test_its_metrics_cover_the_whole_set(tables: dict[str, str]) -> None:
    program = wide(tables)
    values = check_begin(program)
    batch = program.held_out.batch(np.arange(300))
    logits = program.net.apply(values, values, batch, False)[0][:, 0]
    positive = batch["label"] == 1
    pairs = logits[positive][:, None] - logits[~positive]
    wanted = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    for batch_size in (300, 37):
        found = shoal.evaluate(program, values, batch_size=batch_size)
        assert found.keys() == {"loss", "accuracy", "auc"}
        assert found["auc"] == pytest.approx(wanted, abs=1e-12)
        assert found["accuracy"] == pytest.approx(((logits > 0) == positive).mean())


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"categories": ["a"]},
            errors.ProgramError,
            r"categories is \['a'\]; give a mapping of names to integers",
        ),
        ({"crosses": [["a", "b", "flag"]]}, errors.ProgramError, "crosses have .*; give pairs of categories"),
        ({"crosses": ["ab"]}, errors.ProgramError, r"crosses is \['ab'\]; give a list of lists of strings"),
        ({"numbers": {"age": 3}}, errors.ProgramError, "numbers is {'age': 3}; give .* names to lists of numbers"),
        ({"numbers": {"age": [3]}}, errors.ProgramError, r"numbers have \[3\] for 'age'; give \[mean, std\]"),
        ({"numbers": {"age": [3, 0]}}, errors.ProgramError, "with std not 0"),
        ({"hidden": 16}, errors.ProgramError, "hidden is 16; give a list of integers"),
        ({"categories": {"a": "12"}}, errors.ProgramError, "categories is {'a': '12'}; give a mapping"),
        ({"window": 1.5}, errors.ProgramError, "window is 1.5; give an integer"),
        ({"crosses": [["a", "age"]]}, errors.InvalidLayer, "'age' is not one"),
        ({"fill": {"city": 3}}, errors.InvalidData, "fill has a value for 'city', which is not one of the columns"),
        ({"label": "income"}, errors.InvalidData, "income"),
        ({"label": "a"}, errors.InvalidData, "'a'.*twice"),
    ],
)
def test_invalid_settings_of_tables_are_refused(
    tables: dict[str, str], settings: dict[str, Any], error: type[shoal.ShoalError], said: str
) -> None:
    with pytest.raises(error, match=said):
        wide(tables, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"categories": {"a": 5}}, r"column 'a' has 11, but categories has 5, 0 to 4; set a larger number"),
        ({"categories": {"name": 2}}, "column 'name' is of object; categories must be integers from 0 to 1"),
        ({"numbers": "rate, name"}, "column 'name' is of object; numbers must be"),
        ({"label": "age"}, r"the label \d+ is neither 0 nor 1; correct the labels"),
        ({"label": "name"}, "the label [xy] is neither 0 nor 1"),
    ],
)
def test_tables_with_invalid_values_are_refused_when_they_are_read(
    tables: dict[str, str], settings: Mapping[str, str | Mapping[str, int]], said: str
) -> None:
    program = wide(tables, **settings)
    for part, rows in ((program.dataset, 1000), (program.held_out, 300)):
        with pytest.raises(errors.InvalidData, match=said):
            part.batch(np.arange(rows))
        with pytest.raises(errors.InvalidData, match=said):
            list(part.batches(iter([np.arange(rows)])))


def lacking(path: Path, ages: Sequence[float | None]) -> dict[str, Any]:
    """A table with these ages."""
    labels = np.arange(len(ages)) % 2
    pq.write_table(pa.table({"a": labels, "label": labels, "age": pa.array(ages, pa.float64())}), path)
    return {"data": str(path), "held_out": str(path), "categories": {"a": 2}, "numbers": {"age": [30.0, 10.0]}}


def test_nulls_need_a_fill_value(tmp_path: Path) -> None:
    table = lacking(tmp_path / "table.parquet", [20, None, 40, None])
    with pytest.raises(errors.InvalidData, match=r"column 'age' has 2 nulls among 4 values.*give fill={'age': ...}"):
        wide({}, **table).dataset.batch(np.arange(4))
    program = wide({}, **table, fill={"age": 30.0})
    for part in (program.dataset, program.held_out):
        np.testing.assert_array_equal(part.batch(np.arange(4))["age"], np.array([-1, 0, 1, 0], np.float32))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e300])
def test_numbers_that_are_not_finite_are_refused_with_their_column(tmp_path: Path, wrong: float) -> None:
    program = wide({}, **lacking(tmp_path / "table.parquet", [20, wrong, 40, wrong]))
    for part in (program.dataset, program.held_out):
        with pytest.raises(errors.InvalidData, match="column 'age' has 2 of 4 numbers that are NaN, infinite"):
            part.batch(np.arange(4))

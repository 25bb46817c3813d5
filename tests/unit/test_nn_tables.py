"""`wide_and_deep`: what it learns of a table, how it is judged, and what users hear of tables of something else."""

import numpy as np
import pytest

import shoal
from model_data import pairs
from model_steps import begun, stepped, trained
from shoal import errors
from shoal.program import BlockDataset
from shoal_nn.programs import wide_and_deep


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    return {"data": pairs(folder / "train.parquet", 1000, 2), "held_out": pairs(folder / "test.parquet", 300, 3)}


CATEGORIES = {"a": 12, "b": 12, "flag": 2}


def wide(tables, **settings):
    wanted = {"label": "label", "categories": CATEGORIES, "numbers": ["rate"], "hidden": [4], "embedding": 2}
    return wide_and_deep(**{**tables, **wanted, **settings})


def test_a_table_is_read_in_blocks_and_takes_a_step(tables):
    program = wide(tables, numbers={"age": [50, 20], "rate": [0, 1]}, crosses=[["a", "b"]])
    assert isinstance(program.dataset, BlockDataset)
    assert program.dataset.blocks.window == 8
    [first, second] = program.dataset.batches(iter([np.arange(3), np.arange(3, 8)]))
    assert [len(batch["label"]) for batch in (first, second)] == [3, 5]
    assert np.abs(second["age"]).max() < 2
    np.testing.assert_array_equal(second["age"], program.dataset.batch(np.arange(3, 8))["age"])
    step = stepped(program, begun(program), first)
    assert float(step.loss) == pytest.approx(np.log(2), abs=0.5)


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_cross_learns_what_its_categories_alone_do_not(tables, precision):
    settings = {"hidden": [1], "embedding": 1, "precision": precision}  # so that its deep part does not either
    with_cross, without = wide(tables, crosses=[["a", "b"]], **settings), wide(tables, **settings)
    best, other = (shoal.evaluate(it, trained(it, 60, 4.0, batch=256))["auc"] for it in (with_cross, without))
    assert best > 0.9
    assert other < 0.7


def test_its_figures_are_of_the_whole_set(tables):
    program = wide(tables)
    values = begun(program)
    batch = program.held_out.batch(np.arange(300))
    logits = program.net.apply(values, values, program._policy.inputs(batch), False)[0][:, 0]
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
        ({"categories": ["a"]}, errors.ProgramError, r"categories are \['a'\]; say how many there are by column"),
        ({"crosses": [["a", "b", "flag"]]}, errors.ProgramError, "crosses have .*; give pairs of categories"),
        ({"crosses": ["ab"]}, errors.ProgramError, "crosses have 'ab'"),
        ({"numbers": {"age": 3}}, errors.ProgramError, r"numbers have 3 for 'age'; give \[mean, std\]"),
        ({"numbers": {"age": [3, 0]}}, errors.ProgramError, "the latter not 0"),
        ({"crosses": [["a", "age"]]}, errors.InvalidLayer, "'age' is none"),
        ({"precision": "int8"}, errors.InvalidLayer, "not 'int8'"),
        ({"label": "income"}, errors.InvalidData, "income"),
        ({"label": "a"}, errors.InvalidData, "'a'.*twice"),
    ],
)
def test_settings_of_tables_that_make_no_sense(tables, settings, error, said):
    with pytest.raises(error, match=said):
        wide(tables, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"categories": {"a": 5}}, r"column 'a' has 11, and categories says 5, 0 to 4; set a larger number"),
        ({"categories": {"name": 2}}, "column 'name' is of object; categories are whole numbers, from 0 to 1"),
        ({"numbers": "rate, name"}, "column 'name' is of object; numbers are"),
        ({"label": "age"}, r"the label \d+ is neither 0 nor 1; mend the labels"),
        ({"label": "name"}, "the label [xy] is neither 0 nor 1"),
    ],
)
def test_tables_of_something_else_are_met_as_they_are_read(tables, settings, said):
    program = wide(tables, **settings)
    for part, rows in ((program.dataset, 1000), (program.held_out, 300)):
        with pytest.raises(errors.InvalidData, match=said):
            part.batch(np.arange(rows))
        with pytest.raises(errors.InvalidData, match=said):
            list(part.batches(iter([np.arange(rows)])))

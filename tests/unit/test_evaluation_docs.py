"""What docs/evaluation.md shows is so: its program learns and evaluates, and its tables have all there is."""

import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import callbacks
from shoal._cli.submit import submit

DOCS = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()


def test_the_program_learns_what_it_was_not_shown() -> None:
    names: dict[str, object] = {}
    found = re.search(r"^```python\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert found
    exec(found[1], names)
    program = names["Halves"]()
    assert isinstance(program, shoal.program.RandomProgram)
    params, state = program.net.init(np.random.default_rng(0), (8, 8, 1))
    assert program.variables().keys() == params.keys() | state.keys()

    def evaluated() -> dict[str, float]:
        held_out = program.held_out
        return program.evaluate({**params, **state}, held_out.batch(np.arange(len(held_out))))

    first = evaluated()
    for step in range(60):
        batch = program.dataset.batch(np.arange(512))
        given = program.loss_and_gradients({**params, **state}, batch, seed=step)
        params = {name: value - 0.1 * given.gradients[name] for name, value in params.items()}
        state = dict(given.updates)
    last = evaluated()
    assert first.keys() == last.keys() == {"loss", "accuracy"}
    assert last["loss"] < first["loss"]
    assert last["accuracy"] > 0.9


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(shoal.EvaluationPolicy)])
def test_every_field_of_the_policy_is_in_the_table_with_its_flag(field: str) -> None:
    found = re.search(rf"^\| `{field}` \| `--([a-z-]+)` \|", DOCS, re.MULTILINE)
    assert found
    assert found[1].replace("-", "_") in inspect.signature(submit).parameters


def test_every_callback_is_in_the_table() -> None:
    for name in {*callbacks.__all__} - {"Callback"}:
        assert f"| `{name}(" in DOCS

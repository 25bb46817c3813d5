"""Tables of docs/how-to/evaluation.md: they are complete. `tests/cluster/test_evaluation` runs the page's program."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import shoal
from shoal import callbacks
from shoal._cli.submit import submit

DOCS = (Path(__file__).parents[3] / "docs" / "how-to" / "evaluation.md").read_text()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(shoal.EvaluationPolicy)])
def test_every_field_of_the_policy_is_in_the_table_with_its_flag(field: str) -> None:
    found = re.search(rf"^\| `{field}` \| `--([a-z-]+)` \|", DOCS, re.MULTILINE)
    assert found
    assert found[1].replace("-", "_") in inspect.signature(submit).parameters


def test_every_callback_is_in_the_table() -> None:
    for name in {*callbacks.__all__} - {"Callback"}:
        assert f"| `{name}(" in DOCS

"""The notebooks of `examples/notebooks` as they are committed; `make test-frameworks` executes them."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))
LINE = 120


def cells_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_is_one_for_each_framework() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["jax", "keras", "pytorch"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_no_outputs(path: Path) -> None:
    for cell in cells_of(path, "code"):
        assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {}), cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_is_explained_and_fits(path: Path) -> None:
    code = cells_of(path, "code")
    assert [cell["id"] for cell in cells_of(path, "markdown")] == [f"{cell['id']}-text" for cell in code]
    for cell in code:
        assert max(len(line.rstrip("\n")) for line in cell["source"]) <= LINE, cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_file_that_a_cell_writes_is_python(path: Path) -> None:
    """Ruff leaves out these cells."""
    (written,) = (cell["source"] for cell in cells_of(path, "code") if cell["source"][0].startswith("%%writefile "))
    ast.parse("".join(written[1:]))

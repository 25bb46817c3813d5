"""The loops of PyTorch in examples: few lines change, and the results stay."""

import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_after

import shoal
from support.clusters.local import ROOT

LOOPS = ROOT / "examples"
# Lines that may change in a loop, imports aside.
MOST_CHANGED = 4


def body(path: Path) -> list[str]:
    """Returns the lines of a loop without its docstring and its imports."""
    lines = path.read_text().splitlines()
    tree = ast.parse(path.read_text())
    start = max(it.end_lineno or 0 for it in tree.body if isinstance(it, ast.Import | ast.ImportFrom | ast.Expr))
    return [line for line in lines[start:] if line.strip()]


@pytest.mark.parametrize("framework", ["torch"])
def test_few_lines_change(framework: str) -> None:
    before, after = (body(LOOPS / f"{framework}_{when}.py") for when in ("before", "after"))
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in steps if kind != "equal")
    assert 0 < changed <= MOST_CHANGED


def test_two_workers_train_as_one_process(client: shoal.Client, tmp_path: Path) -> None:
    environ = {**os.environ, "SHOAL_COORDINATOR": client.address, "OMP_NUM_THREADS": "1"}
    places = [tmp_path / str(number) for number in range(2)]
    for folder in places:
        folder.mkdir()
    command = [sys.executable, str(LOOPS / "torch_after.py")]
    workers = [subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE) for folder in places]
    for worker in workers:
        output = worker.communicate(timeout=100)[0].decode()
        assert worker.returncode == 0
        assert output.startswith("epoch 0: loss ")
    one, other = (torch.load(folder / "digits.pt") for folder in places)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert client.job("digits").data().total.done == 10 * 1797
    model, (images, labels) = torch_after.network().eval(), torch_after.digits().tensors
    model.load_state_dict(one)
    assert (model(images).argmax(dim=1) == labels).float().mean() >= 0.97

"""The recipe for Lightning of docs/how-to/frameworks.md."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal

PROGRAM = Path(__file__).with_name("lightning_training.py")


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_two_workers_train_a_module(client: shoal.Client, tmp_path: Path, precision: str) -> None:
    files = [tmp_path / f"{number}.pt" for number in range(2)]
    job = f"lightning-{precision}"
    given = [sys.executable, str(PROGRAM), client.address, job]
    processes = [subprocess.Popen([*given, str(file), precision], cwd=tmp_path) for file in files]
    assert [process.wait(timeout=110) for process in processes] == [0, 0]
    one, other = (torch.load(file) for file in files)
    assert one.keys() == other.keys() == client.job(job).pull().keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert client.job(job).status().progress.steps == 2 * 64 // 8  # pushes of both workers

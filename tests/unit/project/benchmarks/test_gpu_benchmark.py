"""GPU benchmark on a machine without a GPU: its arithmetic, and its steps on the CPU."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import gpu
from shoal_worker.arrays import Cpu


def test_the_median_step_counts_and_the_first_ones_do_not() -> None:
    notes = [(0.0, 9.0), (9.0, 10.0), (10.5, 11.0), (11.5, 12.0), (13.0, 16.0)]
    assert gpu.images_per_s(notes, 64, skipped=1) == 64 / 1.0


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 steps are too few, of which 2 do not count"):
        gpu.images_per_s([(0.0, 1.0)] * 3, 64, skipped=2)


def test_steps_alone_train(tmp_path: Path) -> None:
    program = gpu.Images(18, 32, 4, str(tmp_path / "notes"))
    notes = gpu.alone(Cpu(), program, 2, 2)
    assert [len(note) for note in notes] == [2, 2]
    within = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert all(begun <= inner[0] < inner[1] <= ended for (begun, ended), inner in zip(notes, within, strict=True))
    x, y = program.batch(np.arange(3))
    assert (x.shape, y.shape) == ((3, 32, 32, 3), (3,))


def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    gpu.main(["--out", str(tmp_path / "gpu.json")])
    assert "the GPU is not measured: device cuda:0 does not exist" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

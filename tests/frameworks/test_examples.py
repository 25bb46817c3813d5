"""The loops of `examples` before and after, as programs: both workers have one result, as good as that before."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from support.loops import LOOPS

# By loop: its frameworks, and the samples of its job. `fit` of Keras reads its own data.
NEEDS = {"torch": ["torch"], "flax": ["flax", "optax"], "keras": ["keras"], "transformers": ["transformers"]}
SAMPLES = {"torch": 10 * 1797, "flax": 10 * 1797, "keras": None, "transformers": 20 * 48}
JOBS = {"torch": "digits", "flax": "flax-digits", "keras": "keras-digits", "transformers": "counting"}
# Files that a loop writes.
WEIGHTS = {"torch": "digits.pt", "transformers": "counting/model.safetensors"}
BACKENDS = ("jax", "torch", "tensorflow")
PATIENCE_S = 110


def run(loop: str, places: list[Path], **environ: str) -> list[str]:
    """Runs a loop in each folder, at the same time, and returns what the processes print."""
    for place in places:
        place.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, str(LOOPS / f"{loop}.py")],
            cwd=place,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in places
    ]
    printed = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


def accuracy(printed: str) -> float:
    (found,) = re.findall(r"accuracy (\S+)", printed)
    return float(found)


def check(client: shoal.Client, loop: str, folder: Path, **environ: str) -> list[str]:
    """Runs a loop before and after. Returns what the processes print: that before, and the two workers."""
    if missing := [it for it in NEEDS[loop] if not importlib.util.find_spec(it)]:
        pytest.skip(f"{missing[0]} is not installed")
    alone = run(f"{loop}_before", [folder / "alone"], **environ)
    places = [folder / str(number) for number in range(2)]
    both = run(f"{loop}_after", places, SHOAL_COORDINATOR=client.address, **environ)
    if samples := SAMPLES[loop]:
        assert client.job(JOBS[loop]).data().total.done == samples
    if weights := WEIGHTS.get(loop):
        one, other = ((place / weights).read_bytes() for place in places)
        assert (folder / "alone" / weights).exists()
        assert one == other
    return alone + both


def test_pytorch(client: shoal.Client, tmp_path: Path) -> None:
    alone, *_ = check(client, "torch", tmp_path)
    assert alone.startswith("epoch 0: loss ")
    import torch  # noqa: PLC0415 - this module also tests frameworks without it
    import torch_after  # noqa: PLC0415

    images, labels = torch_after.digits().tensors
    right = []
    for place in ("alone", "0"):
        model = torch_after.network().eval()
        model.load_state_dict(torch.load(tmp_path / place / "digits.pt"))
        right.append((model(images).argmax(dim=1) == labels).float().mean())
    assert min(right) >= 0.97


def test_flax(client: shoal.Client, tmp_path: Path) -> None:
    alone, one, other = check(client, "flax", tmp_path)
    assert accuracy(one) == accuracy(other)
    assert min(accuracy(alone), accuracy(one)) >= 0.97


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras(client: shoal.Client, tmp_path: Path, backend: str) -> None:
    if not importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is not installed")
    alone, one, other = check(client, "keras", tmp_path, KERAS_BACKEND=backend)
    assert accuracy(one) == accuracy(other)
    assert min(accuracy(alone), accuracy(one)) >= 0.97


def test_transformers(client: shoal.Client, tmp_path: Path) -> None:
    check(client, "transformers", tmp_path)

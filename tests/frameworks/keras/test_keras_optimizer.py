"""`shoal.keras.DistributedOptimizer` in `model.fit`, on each backend that is installed. A process has one backend."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal

PROGRAM = Path(__file__).with_name("keras_training.py")
MODES = {"jax": "jitted", "torch": "eager", "tensorflow": "eager"}  # TensorFlow makes a graph, without XLA


def weights(path: Path) -> list[np.ndarray]:
    with np.load(path) as found:
        return [found[name] for name in found.files]


@pytest.mark.parametrize("backend", sorted(MODES))
def test_two_workers_train_as_plain_fit(client: shoal.Client, tmp_path: Path, backend: str) -> None:
    if not importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is not installed")
    environ = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    runs = {"plain": (0, 0), "first": (2, 0), "second": (2, 1)}
    processes = {
        name: subprocess.Popen(
            [sys.executable, PROGRAM, str(workers), str(rank), client.address, f"keras-{backend}", tmp_path / name],
            env=environ,
            stdout=subprocess.PIPE,
        )
        for name, (workers, rank) in runs.items()
    }
    for name, process in processes.items():
        output = process.communicate(timeout=110)[0].decode().split()
        assert process.returncode == 0, name
        assert output == [MODES[backend], "72"], name
    progress = client.job(f"keras-{backend}").status().progress
    assert (progress.samples, progress.loss > 0) == (72 * 8, True)
    plain, first, second = (weights(tmp_path / f"{name}.npz") for name in runs)
    for one, other, wanted in zip(first, second, plain, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", sorted(MODES))
def test_it_keeps_the_habits_of_keras(client: shoal.Client, tmp_path: Path, backend: str) -> None:
    """Rates of callbacks, unused layers, half precision, and files of models; see the program."""
    if not importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is not installed")
    environ = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    program = PROGRAM.with_name("keras_habits.py")
    subprocess.run([sys.executable, program, client.address, tmp_path], env=environ, check=True, timeout=110)


def test_other_optimizers_are_refused() -> None:
    script = (
        "import keras, shoal.keras, shoal.errors\n"
        "try: shoal.keras.DistributedOptimizer(keras.optimizers.Adam(), job='m')\n"
        "except shoal.errors.InvalidOptimizer as error: print(error)\n"
    )
    environ = {**os.environ, "KERAS_BACKEND": "torch"}
    told = subprocess.check_output([sys.executable, "-c", script], env=environ, text=True, timeout=60)
    assert "keras.optimizers.Adam(1e-3) is shoal.optim.Adam(1e-3, eps=1e-7" in told

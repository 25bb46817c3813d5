"""The examples of strategies, on a few images."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import keras
from support.clusters.local import ROOT
from support.published_weights import WIDTH, published_value
from support.ranks import addresses, sockets

pytestmark = pytest.mark.cluster

LAUNCHER = ROOT / "tests/support/programs/example_tasks.py"
SHAPES = json.loads((ROOT / "tests/golden/weights.json").read_text())["names"]["keras"]["narrow"]
TWO = ["--devices", "/cpu:0", "/cpu:1"]
SMALL = ["--depth", "8", "--batch-size", "8"]
RESULT = re.compile(r"test loss (\d+\.\d{4}), test accuracy (0\.\d{4}|1\.0000)")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of Keras' files, with 40 images in the form of CIFAR-10."""
    home = tmp_path_factory.mktemp("keras")
    folder = home / "datasets" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (8, 1 + 3 * 32 * 32), np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
    return home


def run(home: Path, *tasks: tuple[str, list[str], str]) -> str:
    """Runs examples at the same time; returns what they write."""
    environment = {key: value for key, value in os.environ.items() if key not in {"SHOAL_COORDINATOR", "TF_CONFIG"}}
    done = subprocess.run(
        [sys.executable, LAUNCHER],
        input=json.dumps(tasks),
        env={**environment, "KERAS_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tasks_of(kinds: dict[str, int], name: str, arguments: list[str]) -> list[tuple[str, list[str], str]]:
    """Returns the tasks of a cluster on this host, by the number of those of each type."""
    held = sockets(sum(kinds.values()))
    places = iter(addresses(held))
    cluster = {kind: list(itertools.islice(places, count)) for kind, count in kinds.items()}
    for each in held:
        each.close()
    return [
        (name, arguments, json.dumps({"cluster": cluster, "task": {"type": kind, "index": number}}))
        for kind, count in kinds.items()
        for number in range(count)
    ]


def test_two_processes_equal_two_devices(home: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--epochs", "1", "--backup", str(tmp_path / "backup")]
    said = run(
        home,
        ("mirrored.py", [*SMALL, *TWO, "--epochs", "1"], ""),
        *tasks_of({"worker": 2}, "multi_worker.py", arguments),
    )
    results = np.array([[float(it) for it in found] for found in RESULT.findall(said)])
    assert len(results) == 3
    np.testing.assert_allclose(results, results[:1].repeat(3, axis=0), rtol=1e-3)


def test_examples_of_one_process(home: Path, tmp_path: Path) -> None:
    weights: Any = {name: published_value("keras", name, tuple(shape)) for name, shape in SHAPES.items()}
    np.savez(tmp_path / "weights.npz", **weights)
    mobilenet = [
        "--weights",
        str(tmp_path / "weights.npz"),
        "--alpha",
        str(WIDTH),
        "--size",
        "48",
        "--epochs",
        "1",
        "1",
    ]
    said = run(
        home,
        ("central_storage.py", [*SMALL, *TWO, "--epochs", "1"], ""),
        ("custom_loop.py", [*SMALL, *TWO, "--epochs", "2", "--checkpoints", str(tmp_path / "checkpoints")], ""),
        ("mobilenet.py", [*mobilenet, *TWO, "--batch-size", "8"], ""),
    )
    assert len(RESULT.findall(said)) == 4
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["ckpt-1.npz"]  # of every second epoch


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_servers_and_four_workers(home: Path, mode: str) -> None:
    arguments = [*SMALL, "--epochs", "1", "--steps", "2", "--consistency", mode]
    said = run(home, *tasks_of({"ps": 2, "chief": 1, "worker": 3}, "parameter_server.py", arguments))
    results = RESULT.findall(said)
    assert len(results) == 4
    if mode == "sync":
        assert len({*results}) == 4  # each has evaluated its own part of the images


def test_the_data_are_in_keras_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_HOME", str(home))
    (images, labels), (test_images, test_labels) = keras.datasets.cifar10.load_data()
    assert (images.shape, labels.shape) == ((40, 32, 32, 3), (40, 1))
    assert (test_images.shape, test_labels.shape) == ((8, 32, 32, 3), (8, 1))
    assert images.dtype == labels.dtype == np.uint8
    monkeypatch.setenv("KERAS_HOME", str(home / "elsewhere"))
    with pytest.raises(
        errors.InvalidData, match=r"elsewhere/datasets/cifar-10-binary\.tar\.gz; download https://www\."
    ):
        keras.datasets.cifar10.load_data()

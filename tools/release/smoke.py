"""The smoke test of an installed Shoal, in a folder with nothing else: `python smoke.py VERSION`.

It checks that the command line works, that the kernels compile, and that the packages have type information. Then it
trains a linear model on a cluster of this machine, and checks that the coefficients are right.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import shoal

WANTED = [1.0, -2.0, 3.0]


class Line:
    """A line to fit: its own program and data set."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(1000, 3))
        self.y = self.x @ WANTED
        self.dataset = self

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.x[indices], self.y[indices]

    def variables(self) -> dict[str, np.ndarray]:
        return {"w": np.zeros(3)}

    def loss_and_gradients(self, params: dict, batch: tuple) -> tuple[float, dict]:
        x, y = batch
        error = x @ params["w"] - y
        return float((error**2).mean()), {"w": 2 * x.T @ error / len(y)}


def check_installation(version: str) -> None:
    """Checks what was installed, and that the command line speaks for it."""
    for package in ("shoal", "shoal_server", "shoal_coordinator", "shoal_worker", "shoal_nn", "shoal_distribute"):
        found = importlib.util.find_spec(package)
        assert found is not None, f"there is no {package}"
        assert found.origin is not None, f"{package} has no __init__"
        assert found.origin.startswith(sys.prefix), f"{package} is at {found.origin}, not in {sys.prefix}"
        assert (Path(found.origin).parent / "py.typed").is_file(), f"{package} has no py.typed"
    told = json.loads(shell("shoal", "version", "--json"))
    assert told["version"] == version, f"`shoal version` says {told['version']}, not {version}"
    assert told["commit"], "`shoal version` knows no commit"
    for role in ("coordinator", "server", "worker"):
        assert "--metrics-listen" in shell("shoal", role, "--help")
    assert "compiled" in shell("shoal", "compile", "kernels", "--level", "x86-64-v2")
    print(shell("shoal", "--version"), end="")


def train() -> None:
    """Trains on a cluster of this machine."""
    with shoal.LocalCluster(servers=2, workers=2) as cluster, cluster.client() as client:
        job = client.submit(shoal.Job("smoke:Line", workers=2, consistency=shoal.BoundedStaleness(4), epochs=5))
        job.wait()
        found = client.pull(job)["w"]
    assert np.allclose(found, WANTED, atol=0.01), f"trained to {found}, not to {WANTED}"
    print(f"trained to {np.round(found, 3)}")


def shell(*command: str) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


if __name__ == "__main__":
    check_installation(sys.argv[1])
    train()

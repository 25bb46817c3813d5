"""First programs that a new user runs: the demo, and the plain session. `make long` runs the demo in full."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shoal
from support.run_lengths import size

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = {"mode", "steps", "samples_per_s", "test_accuracy", "staleness_p50", "staleness_max"}


def test_the_demo_trains_in_each_mode_and_draws_the_curves(tmp_path: Path) -> None:
    start = time.monotonic()
    epochs = size(["--epochs", "10"], [])
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path / "runs"), *epochs]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    took = time.monotonic() - start
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert took < 90

    rows = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert [row["mode"] for row in rows] == ["sync", "async", "ssp:4"]
    for row in rows:
        assert row.keys() == KEYS
        assert row["test_accuracy"] >= 0.97
        assert row["steps"] > 0
        assert row["samples_per_s"] > 0
        assert row["mode"] in demo.stdout
    sync, _, bounded = rows
    assert sync["staleness_max"] == 0
    assert bounded["staleness_p50"] <= bounded["staleness_max"]
    assert (tmp_path / "runs" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_plain_session_finds_the_line_in_two_processes(shared_cluster: shoal.LocalCluster) -> None:
    environment = {**os.environ, "SHOAL_COORDINATOR": shared_cluster.address, "WORKERS": "2"}
    command = [sys.executable, str(EXAMPLES / "plain_session.py")]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    for rank, text in enumerate(sorted(said)):
        found = re.fullmatch(rf"worker {rank}: loss \S+, w \[(.+)\], b (\S+)\n", text)
        assert found, text
        np.testing.assert_allclose([float(number) for number in found[1].split()], [1, -2, 3, 0.5], atol=0.01)
        assert float(found[2]) == pytest.approx(4, abs=0.01)

"""`make bench` from end to end in its short form, without peers. The tests check that it runs, not how fast."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_coordinator.cluster.heartbeat_interval import CALLS_PER_S
from support.run_lengths import long_only, size

pytestmark = pytest.mark.cluster

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
sys.path.append(str(RUN.parent / "control_plane"))

from scale_page import tables  # noqa: E402 - benchmarks are no package
from throughput_model import Constants  # noqa: E402


def short_run(script: str, *flags: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs the short form of a benchmark, which prints one line of JSON whatever it has measured."""
    command = [sys.executable, str(RUN.parent / script), "--short", *flags]
    bench = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert bench.stdout, bench.stderr
    return bench


def test_some_benchmarks_run_and_write_their_rows(tmp_path: Path) -> None:
    chosen = size("small,data", "small,data,checkpoints")
    command = [sys.executable, str(RUN), chosen, "--short", "--no-peers", "--results", str(tmp_path)]
    bench = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert bench.returncode == 0, bench.stdout + bench.stderr

    rows = json.loads((tmp_path / "latest.json").read_text())
    checkpoints = size([], ["checkpoint_write", "checkpoint_restore", "checkpoint_slowdown"])
    data = ["parquet_scan", "parquet_scan_in_order"]
    assert {row["name"] for row in rows} == {"small", "small_overlapped", *data, *checkpoints}
    for row in rows:
        assert row.keys() == {"name", "ours", "unit", "peer", "theirs", "ratio"}
        assert row["ours"] > 0
        assert row["name"] in bench.stdout
        if row["name"].startswith("small"):
            assert row["unit"] == "steps/s"
        else:
            assert row["ratio"] > 0
    assert json.loads((tmp_path / "machine.json").read_text())["small"]["left_out"] == {}
    assert (tmp_path / "latest.svg").exists()


def test_the_soak_runs(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    command = [sys.executable, str(RUN.parent / "cluster" / "soak.py"), "--short", "--results", str(results)]
    soak = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    result = json.loads(results.read_text())
    assert result["jobs"] >= 1
    roles = {"coordinator", "server-0", "server-1", "worker-0", "worker-1"}
    assert {row["role"] for row in result["rows"]} == roles | {"all"}
    assert all(row["by_minute"] for row in result["rows"])


def test_the_control_plane_with_simulated_members() -> None:
    """The short form of `make scale`: members keep the interval that they are told, and none is declared lost."""
    sizes = {"workers": 40, "servers": 4, "heartbeat-timeout-s": 2, "interval-s": 0.05, "measured-s": 1}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    bench = short_run("control_plane/scale.py", *flags, timeout_s=200)
    line = json.loads(bench.stdout)
    found = line["control_plane"]
    assert found["interval_s"] == pytest.approx(44 / CALLS_PER_S, abs=0.001)
    assert found["declared_lost"] == 0
    assert found["steps_reported"] > 40
    assert 0 < found["admitted_s"] < 30
    assert 0 < found["joined_s"] < 30
    assert 0 < found["cancel_s"] < 30
    assert 2 < found["released_after_s"] < 30
    assert found["us_per_bare_call"] > 0
    assert Constants.measured(line).report_s > 0
    assert "| 10,000 |" in tables(line)


def test_the_costs_of_steps() -> None:
    bench = short_run("control_plane/constants.py", "--case", "small_two_servers", timeout_s=60)
    assert all(value > 0 for value in json.loads(bench.stdout).values())


@long_only
def test_the_cost_of_a_small_step() -> None:
    bench = short_run("server/small_step.py", timeout_s=100)
    line = json.loads(bench.stdout)
    for shards in (1, 16):
        median, least, most = line[f"shards_{shards}_ms"]
        assert 0 < least <= median <= most
    assert line["ratio"] > 0


@long_only
def test_sessions_that_wait_for_one_more() -> None:
    bench = short_run("control_plane/waiting_workers.py", timeout_s=200)
    line = json.loads(bench.stdout)
    assert line["workers"] == 8
    # The measurements themselves depend on what else the machine does.
    assert bench.returncode == bool(line["missed"])
    targets = {"longest_heartbeat_gap_s": 1.0, "coordinator_cores": 0.2, "all_train_after_s": 5.0}
    assert line["missed"] == [f"{name} at most {most:g}" for name, most in targets.items() if line[name] > most]
    assert 0 < line["all_train_after_s"] < 60

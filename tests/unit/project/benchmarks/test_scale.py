"""Scale model: which resource bounds the throughput for each number of workers. Its page shows the measured results."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "benchmarks" / "control_plane"))

import scale_page  # noqa: E402 - benchmarks are no package
from throughput_model import (  # noqa: E402
    CASES,
    COMPUTE,
    COORDINATOR,
    WORKERS,
    Case,
    Constants,
    Cost,
    coordinator_cores,
    estimate,
    table,
)

# Round numbers: 1 ms a call, 1 ns a byte.
CONSTANTS = Constants(
    server_pull=Cost(1e-3, 1e-9),
    server_push=Cost(1e-3, 1e-9),
    staged_pull_s=1.5e-3,
    staged_push_s=2.5e-3,
    synchronous_byte_s=2e-9,
    worker_byte_s=1e-9,
    report_s=1e-3,
)
CASE = Case("a", 1e6, 1.0, 10, synchronous=False, workers_a_server=10, server_cores=4)
FAST_GBIT = 1e6


def result() -> dict[str, object]:
    """A result of `scale` that was measured with CONSTANTS."""
    one = {"bytes": 1e6, "servers": 1.0, "server_pull_s": 2e-3, "server_push_s": 2e-3, "worker_step_s": 5e-3}
    large = {"bytes": 1e8, "servers": 1.0, "server_pull_s": 0.101, "server_push_s": 0.101, "worker_step_s": 0.203}
    return {
        "control_plane": {"us_per_call": 1000},
        "data_plane": {
            "small_asynchronous": one,
            "small_two_servers": {"bytes": 1e6, "servers": 2.0, "server_step_s": 5e-3, "server_pull_s": 2e-3},
            "large_asynchronous": large,
            "large_synchronous": {"bytes": 1e8, "servers": 1.0, "server_step_s": 0.3},
        },
    }


def test_constants_are_the_lines_through_the_measurements() -> None:
    found = Constants.measured(result())
    assert (found.server_pull.call_s, found.server_pull.byte_s) == pytest.approx((1e-3, 1e-9))
    assert (found.server_push.call_s, found.server_push.byte_s) == pytest.approx((1e-3, 1e-9))
    assert (found.staged_pull_s, found.staged_push_s) == pytest.approx((1.5e-3, 2.5e-3))
    assert found.synchronous_byte_s == pytest.approx(2e-9)
    assert (found.worker_byte_s, found.report_s) == pytest.approx((1e-9, 1e-3))


@pytest.mark.parametrize(
    ("case", "workers", "link_gbit", "bottleneck", "steps_per_s"),
    [
        (CASE, 10, FAST_GBIT, COMPUTE, 10.0),
        # 1e9 bytes in each direction of a worker, 8 s at 1 Gbit/s; the same bytes of 10 workers leave 10 servers.
        (replace(CASE, model_bytes=1e9, workers_a_server=1), 10, 1.0, "worker link", 10 / 8),
        # Two directions of 1e10 bytes at 1 ns.
        (replace(CASE, model_bytes=1e10, workers_a_server=1, server_cores=99), 10, FAST_GBIT, "worker processor", 0.5),
        # 10 workers, and one link of 1e8 bytes a round each.
        (replace(CASE, model_bytes=1e8), 10, 1.0, "server links", 10 / 8),
        # One server: 2 ms a step, whatever its cores.
        (replace(CASE, workers_a_server=0, compute_s=0.01), 1_000, FAST_GBIT, "server interpreter", 500.0),
        # 20 servers: 4 ms of each for a step.
        (replace(CASE, compute_s=0.1), 200, FAST_GBIT, "server interpreter", 250.0),
        # 2e9 bytes x 1 ns for each of 10 workers, on 4 cores, and 2 ms of calls.
        (replace(CASE, model_bytes=1e9), 10, FAST_GBIT, "server processors", 40 / (10 * 2.002)),
    ],
)
def test_bottlenecks(case: Case, workers: int, link_gbit: float, bottleneck: str, steps_per_s: float) -> None:
    found = estimate(case, workers, link_gbit, CONSTANTS)
    assert found.bottleneck == bottleneck
    assert found.steps_per_s == pytest.approx(steps_per_s)
    assert found.samples_per_s == pytest.approx(10 * steps_per_s)
    assert found.bytes_per_s == pytest.approx(2 * steps_per_s * case.model_bytes)


def test_a_synchronous_round_is_a_computation_then_a_pull_then_a_push() -> None:
    case = replace(CASE, model_bytes=1e8, synchronous=True, workers_a_server=1)
    found = estimate(case, 10, 1.0, CONSTANTS)
    assert found.steps_per_s == pytest.approx(10 / (1.0 + 0.8 + 0.8))
    assert found.bottleneck == "worker link"


def test_the_coordinator_bounds_the_workers_that_it_can_hear() -> None:
    case = replace(CASE, heartbeat_timeout_s=10.0)
    busy = coordinator_cores(10_000 + 1_000, 10.0, CONSTANTS.report_s)
    assert busy == pytest.approx(11_000 / (0.84 * 10 / 3) * 1e-3)
    found = estimate(replace(case, compute_s=1e3), 10_000, FAST_GBIT, CONSTANTS)
    assert found.bottleneck == COORDINATOR
    assert found.steps_per_s == pytest.approx(10 / busy, rel=1e-3)
    assert found.share == pytest.approx(1 / busy, rel=1e-3)


@pytest.mark.parametrize(("synchronous", "steps_per_s"), [(False, 500.0), (True, 499.8)])
def test_the_coordinator_is_no_bottleneck_if_the_workers_it_hears_saturate_a_server(
    synchronous: bool, steps_per_s: float
) -> None:
    case = replace(CASE, workers_a_server=0, compute_s=0.001, heartbeat_timeout_s=10.0, synchronous=synchronous)
    assert coordinator_cores(10_000 + 1, 10.0, CONSTANTS.report_s) > 3
    found = estimate(case, 10_000, FAST_GBIT, CONSTANTS)
    assert found.bottleneck == "server interpreter"
    assert found.steps_per_s == pytest.approx(steps_per_s, rel=1e-3)


def test_a_staged_pull_and_a_staged_push_have_costs_of_their_own() -> None:
    """A synchronous round whose pull waits for the links, and whose push waits for the interpreter."""
    case = replace(CASE, model_bytes=2.5e6, synchronous=True, server_cores=99)
    found = estimate(case, 100, 1.0, CONSTANTS)
    assert found.steps_per_s == pytest.approx(100 / (1.0 + 0.2 + 0.25))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_more_workers_and_faster_links_are_never_slower(case: Case) -> None:
    rows = table(case, replace(CONSTANTS, report_s=0.0))
    assert [row[0].workers for row in rows] == list(WORKERS)
    for slow, fast in rows:
        assert slow.steps_per_s <= fast.steps_per_s
        assert 0 < fast.share <= 1
    for fewer, more in pairwise(rows):
        assert more[1].steps_per_s >= 0.7 * fewer[1].steps_per_s  # more servers cost more calls


def test_the_page_has_the_tables_of_the_result() -> None:
    page = scale_page.PAGE.read_text()
    written = page.partition(scale_page.BEGIN)[2].partition(scale_page.END)[0].strip()
    assert written == scale_page.tables(json.loads(scale_page.RESULT.read_text())).strip(), (
        "renew them: python benchmarks/control_plane/scale_page.py"
    )


def test_the_chart_shows_the_result(tmp_path: Path) -> None:
    constants = Constants.measured(json.loads(scale_page.RESULT.read_text()))
    drawn = scale_page.shown(constants)
    assert drawn in scale_page.CHART.read_text(), "renew it: python benchmarks/control_plane/scale_page.py"
    scale_page.draw(constants, tmp_path / "scale.svg")
    assert drawn in (tmp_path / "scale.svg").read_text()
    assert scale_page.shown(replace(constants, report_s=1.0)) != drawn


def test_the_page_says_which_targets_are_missed() -> None:
    kept = json.loads(scale_page.RESULT.read_text())
    kept["control_plane"] |= {"coordinator_cores": 0.4, "missed": ["coordinator_cores at most 0.3"]}
    rows = [line for line in scale_page.tables(kept).splitlines() if "under" in line]
    assert {row.split(" | ")[0]: row.split(" | ")[-1] for row in rows if "CPU while" in row} == {
        "| coordinator CPU while all train": "no |"
    }
    assert [row.split(" | ")[-1] for row in rows].count("yes |") == len(rows) - 1

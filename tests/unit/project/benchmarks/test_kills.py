"""Benchmark of kills: its victims, its supervisor, what counts as useful, and the page with its results."""

import copy
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.waiting import wait_until

ROOT = Path(__file__).parents[4]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "kills")]

import compare_kills  # noqa: E402 - benchmarks are no package
import kills_page  # noqa: E402
import schedule  # noqa: E402
from supervisor import Supervisor  # noqa: E402
from update_log import BATCH, Entry, UpdateLog, read, useful  # noqa: E402

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


# The victims.


def test_the_victims_depend_only_on_the_seed() -> None:
    assert schedule.kills(600) == schedule.kills(600)
    assert schedule.kills(600)[:3] == schedule.kills(60)
    assert schedule.kills(600, seed=1) != schedule.kills(600, seed=2)


def test_a_kill_is_an_interval_away_from_the_next_one_and_from_both_ends() -> None:
    assert [kill.at_s for kill in schedule.kills(60, 15)] == [15, 30, 45]
    assert [kill.at_s for kill in schedule.kills(50, 15)] == [15, 30]
    assert schedule.kills(15, 15) == schedule.kills(1, 15) == ()


def test_each_process_is_a_victim_as_often_as_the_others() -> None:
    counts = Counter(kill.victim for kill in schedule.kills(15 * 6_001))
    assert set(counts) == {f"server-{index}" for index in range(2)} | {f"worker-{index}" for index in range(4)}
    assert all(850 < count < 1_150 for count in counts.values())


# What counts as useful.


def test_updates_that_were_undone_are_not_useful() -> None:
    entries = [Entry(1.0, 10), Entry(2.0, 20), Entry(3.0, 30), Entry(4.0, 15), Entry(5.0, 25)]
    assert useful([entries], [0.5, 1.0, 2.5, 3.5, 4.0, 4.5, 5.0]) == [10, 10, 15, 15, 15, 15, 25]


def test_a_copy_that_the_others_replace_does_not_undo_their_updates() -> None:
    others = [Entry(float(at), 10 * at) for at in range(1, 20)]
    alone = [Entry(5.0, 3), Entry(6.0, 4), Entry(8.0, 80)]
    assert useful([others, alone], [4.0, 5.5, 8.0]) == [40, 50, 80]
    assert useful([others[:5], [*alone[:2], Entry(60.0, 5)]], [4.0, 6.0]) == [5, 5]  # nobody saw more for a long time


def test_a_log_goes_on_after_its_process_was_killed_while_it_wrote(tmp_path: Path) -> None:
    UpdateLog(tmp_path / "worker-1.updates").append(3, 2.0)
    UpdateLog(tmp_path / "worker-0.updates").append(1, 1.0)
    UpdateLog(tmp_path / "worker-0.updates").append(4, 3.0)
    with (tmp_path / "worker-1.updates").open("ab") as log:
        log.write(b"part")
    assert read(tmp_path) == [[Entry(1.0, 1), Entry(3.0, 4)], [Entry(2.0, 3)]]


def test_a_run_counts_samples_from_its_begin_to_its_end() -> None:
    entries = [Entry(float(at), count) for at, count in enumerate([0, 5, 10, 15, 20, 25, 30, 12, 17, 22, 27, 32, 37])]
    found = compare_kills.measured([entries], begin=2.0, seconds=9.0)
    # 32 batches at the end, 10 at the begin.
    assert found["curve"] == [0, BATCH * (12 - 10), BATCH * (32 - 10)]
    assert (found["samples"], found["samples_per_s"]) == (BATCH * 22, round(BATCH * 22 / 9, 1))


def test_the_number_of_undone_updates_is_that_of_acknowledged_updates_that_are_missing() -> None:
    entries = [Entry(0.1 * at, at if at < 60 else at - 20) for at in range(101)]
    found = compare_kills.measured([entries], begin=0.0, seconds=10.0)
    assert (found["samples"], found["undone"]) == (BATCH * 80, 20)


def test_undisturbed_runs_before_and_after_count_together() -> None:
    before = {"seconds": 60.0, "samples": 600, "samples_per_s": 10.0, "load": 1.0}
    after = {"seconds": 30.0, "samples": 600, "samples_per_s": 20.0, "load": 2.0}
    found = compare_kills.joined([before, after])
    assert found == {"seconds": 90.0, "samples_per_s": 13.3, "load": 1.5, "runs": [10.0, 20.0]}


# The supervisor.


def test_the_supervisor_starts_a_killed_process_again_and_ends_all(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("one", SLEEP)
        supervisor.start("other", SLEEP)
        first = set(psutil.Process().children()) - before
        supervisor.kill("one")
        wait_until(lambda: supervisor.restarts()["one"] == 1, timeout_s=20, what="the restart")
        assert supervisor.restarts() == {"one": 1, "other": 0}
        assert len(set(psutil.Process().children()) - before - first) == 1
        supervisor.end("other")
        assert supervisor.restarts() == {"one": 1}
    assert set(psutil.Process().children()) <= before


def test_a_process_that_ends_at_once_is_started_again_after_a_pause(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("broken", [sys.executable, "-c", "print('no')"])
        wait_until(lambda: supervisor.restarts()["broken"] >= 1, timeout_s=20, what="a restart")
        assert supervisor.restarts()["broken"] <= 2
    assert "no" in (tmp_path / "broken.log").read_text()


def test_a_process_may_be_killed_by_somebody_else(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with Supervisor(tmp_path) as supervisor:
        supervisor.start("one", SLEEP)
        (process,) = set(psutil.Process().children()) - before
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: supervisor.restarts()["one"] == 1, timeout_s=20, what="the restart")


# The page.


@pytest.fixture
def kept() -> list[dict[str, Any]]:
    return json.loads(kills_page.RESULT.read_text())  # type: ignore[no-any-return] # a list of results


def test_the_page_and_the_chart_show_the_results(kept: list[dict[str, Any]], tmp_path: Path) -> None:
    page = kills_page.PAGE.read_text()
    written = page.partition(kills_page.BEGIN)[2].partition(kills_page.END)[0].strip()
    assert written == kills_page.table(kept).strip(), "renew it: python benchmarks/kills/kills_page.py"
    drawn = kills_page.shown(kept)
    assert drawn in kills_page.CHART.read_text(), "renew it: python benchmarks/kills/kills_page.py"
    kills_page.draw(kept, tmp_path / "kills.svg")
    assert drawn in (tmp_path / "kills.svg").read_text()
    changed = copy.deepcopy(kept)
    changed[0]["killed"]["curve"][-1] += 1
    assert kills_page.shown(changed) != drawn


def test_a_kill_is_compared_with_the_time_before_it() -> None:
    assert [kill.at_s for kill in schedule.kills(60)] == [15, 30, 45]
    # The first two kills cost 5 s, the third none.
    curve = [0, 50, 100, 150, 150, 200, 250, 250, 300, 350, 400, 450, 500]
    assert kills_page.share_of_before({"killed": {"seconds": 60.0, "curve": curve}}) == pytest.approx(350 / 450)


def test_all_systems_had_the_same_victims(kept: list[dict[str, Any]]) -> None:
    expected = Counter(kill.role for kill in schedule.kills(compare_kills.SECONDS))
    for result in kept:
        victims = result["killed"]["victims"]
        workers = sum(count for name, count in victims.items() if name.startswith("worker"))
        assert (workers, sum(victims.values()) - workers) == (expected["worker"], expected["server"]), result["name"]


def test_a_new_result_replaces_the_earlier_one_of_its_system(
    kept: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RESULT", "PAGE", "CHART"):
        copied = tmp_path / getattr(kills_page, name).name
        copied.write_text(getattr(kills_page, name).read_text())
        monkeypatch.setattr(kills_page, name, copied)
    changed = copy.deepcopy(kept[0])
    changed["killed"]["samples_per_s"] = 0.0
    kills_page.keep(changed)
    assert [it["key"] for it in kills_page.kept()] == [it["key"] for it in kept]
    assert f"| {changed['name']} |" in kills_page.PAGE.read_text()
    assert " | 0.0% | " in kills_page.PAGE.read_text()

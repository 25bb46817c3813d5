"""The benchmarks' own logic: the best peer, missing rows, targets, files of results, and the table in the docs."""

import json
import math
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from shoal import errors
from support import leaks

ROOT = Path(__file__).parents[4]
BENCHMARKS = ROOT / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "strategies")]

import compare_strategies  # noqa: E402 - benchmarks are no package
import nn  # noqa: E402
import nn_step  # noqa: E402
import record  # noqa: E402
import rivals  # noqa: E402
import rows  # noqa: E402
import strategies_page  # noqa: E402
from harness import Contestant, Run, alternate, median  # noqa: E402
from peers import nn_workload, workload  # noqa: E402
from processes import last_object  # noqa: E402
from record import Results  # noqa: E402
from rows import Row, against_best, compared  # noqa: E402
from step import even_shapes  # noqa: E402

ISSUE = [
    *("dense_tcp", "dense_shm", "small"),
    *("kernel_sgd", "kernel_adagrad", "kernel_adam", "kernel_adamw"),
    *("many_variables", "shards_4", "memory_rest", "memory_pull_6gb", "ready_seconds"),
    *("resnet18_cpu", "gpu_resnet50_cluster"),
]
MACHINE = {
    "cpu": "a",
    "cores": 2,
    "memory_gb": 8,
    "kernel": "6",
    "python": "3.11",
    "versions": {"shoal": "1"},
    "peers": {"torch": "2"},
}


def ran(*benches: str, **otherwise: str) -> dict[str, Any]:
    about = {"date": "today", "rounds": 3, "limits": {"memcpy": 20.0}, "left_out": {}, "machine": MACHINE | otherwise}
    return dict.fromkeys(benches, about)


# Rows.


def test_a_ratio_above_1_is_better_whatever_the_unit() -> None:
    assert compared("dense_tcp", 4.0, "GB/s", "x", 2.0).ratio == 2
    assert compared("many_variables", 50.0, "ms", "x", 100.0).ratio == 2
    assert compared("memory_rest", 100.0, "MB", "x", 50.0).ratio == 0.5


def test_the_best_peer_is_the_one_with_the_best_median() -> None:
    medians = {"slow": 1.0, "fast": 3.0}
    assert against_best("small", 6.0, "steps/s", medians) == Row("small", 6.0, "steps/s", "fast", 3.0, 2.0)
    assert against_best("small", 6.0, "ms", medians).peer == "slow"
    assert against_best("small", 6.0, "steps/s", {}) == Row("small", 6.0, "steps/s", "", None, None)


@pytest.mark.parametrize(
    ("name", "ratio", "holds"),
    [
        ("dense_tcp", 1.6, True),
        ("dense_tcp", 1.59, False),
        ("dense_shm", 2.7, True),
        ("small", 1.39, False),
        ("kernel_adam", 0.95, True),
        ("many_variables", 0.87, True),
        ("many_variables", 0.86, False),
        ("shards_4", 0.953, True),
        ("shards_4", 0.952, False),
        ("ready_seconds", 0.99, False),
        ("resnet18_cpu", 0.5, True),
        ("resnet18_cpu", 0.49, False),
        ("gpu_resnet50_cluster", 0.89, False),
        ("waiting_pulls", 0.49, False),
        ("small_overlapped", 0.1, None),
        ("small", None, None),
    ],
)
def test_what_is_asked_holds_from_its_ratio_on(name: str, ratio: float | None, holds: bool | None) -> None:
    assert Row(name, 1.0, "ms", "", None, ratio).holds is holds


def test_the_names_are_those_that_are_asked_for() -> None:
    assert set(ISSUE) <= set(rows.expected(rows.DEFAULT_BENCHES))
    assert all(rows.FIGURES[name].at_least for name in ISSUE)
    assert all(bool(figure.asked) == (figure.at_least is not None) for figure in rows.FIGURES.values())


def test_a_row_is_missing_if_it_has_nothing_to_compare_with_though_peers_were_given() -> None:
    alone = [Row("small", 1.0, "steps/s", "", None, None), Row("small_overlapped", 1.0, "steps/s", "x", 1.0, 1.0)]
    assert rows.missing(alone, ["small"], peers=False) == []
    assert rows.missing(alone, ["small"], peers=True) == ["small"]
    assert rows.missing(alone[1:], ["small"], peers=False) == ["small"]
    assert rows.missing(alone[1:], ["small"], peers=False, skipped={"small": "why"}) == []


def test_a_run_replaces_only_its_rows() -> None:
    old = [Row(name, 1.0, "ms", "", None, None) for name in ("small_overlapped", "dense_tcp", "small", "no_such_row")]
    new = [Row("small", 2.0, "ms", "", None, None)]
    assert [(row.name, row.ours) for row in rows.merged(old, new, ["small"])] == [("dense_tcp", 1.0), ("small", 2.0)]


def test_a_row_survives_its_json() -> None:
    row = against_best("small", 1234.56, "steps/s", {"x": 1000.0})
    told = json.loads(json.dumps(row.to_json()))
    assert list(told) == ["name", "ours", "unit", "peer", "theirs", "ratio"]
    assert (told["ours"], told["ratio"]) == (1235, 1.235)
    assert Row.from_json({**told, "more": 1}) == Row("small", 1235, "steps/s", "x", 1000, 1.235)


def test_the_table_says_what_is_asked_and_whether_it_holds() -> None:
    _, _, line = rows.markdown([against_best("small", 1500.0, "steps/s", {"Ray": 1000.0})]).splitlines()
    cells = [
        "`small`",
        "small step, without overlap",
        "1,500 steps/s",
        "Ray",
        "1,000 steps/s",
        "1.50",
        "at least 2x",
        "no",
    ]
    assert line == f"| {' | '.join(cells)} |"


# The files.


def test_a_run_keeps_the_others_and_each_says_on_which_machine_it_was() -> None:
    old = Results([Row("dense_tcp", 1.0, "GB/s", "", None, None)], {}, ran("dense", "kernels"))
    new = Results([Row("small", 1.0, "steps/s", "", None, None)], {}, ran("small", cpu="b"))
    both = old.replaced(new)
    assert [row.name for row in both.rows] == ["dense_tcp", "small"]
    _, first, runs, second, other = both.block().split("\n\n")
    assert (first, second) == (
        "a, 2 cores, 8 GB; Linux 6, Python 3.11; shoal 1, torch 2:",
        "b, 2 cores, 8 GB; Linux 6, Python 3.11; shoal 1, torch 2:",
    )
    assert [line.split(":")[0] for line in runs.splitlines()] == ["- `dense`", "- `kernels`"]
    assert other == "- `small`: today, 3 rounds; memcpy 20"
    assert both.replaced(Results([], {}, ran("small"))).block().count("cores") == 1


def test_files_are_read_as_they_were_written_and_the_chart_is_drawn(tmp_path: Path) -> None:
    lines = {"Shoal": [{"steps_per_s": 3.0}, {"steps_per_s": 4.0}], "Ray": [{"steps_per_s": 2.0}, {"steps_per_s": 1.0}]}
    results = Results([compared("small", 3.5, "steps/s", "Ray", 1.5)], {"small": lines}, ran("small"))
    record.save(results, tmp_path)
    again = record.load(tmp_path)
    assert (again.rounds, again.runs) == (results.rounds, results.runs)
    assert [row.name for row in again.rows] == ["small"]
    chart = (tmp_path / "latest.svg").read_bytes()
    record.save(results, tmp_path)
    assert (tmp_path / "latest.svg").read_bytes() == chart


def test_a_block_takes_the_place_of_what_was_between_its_markers() -> None:
    page = f"a\n{record.BEGIN}\nold\n{record.END}\nb\n"
    assert record.fill(page, "new") == f"a\n{record.BEGIN}\n\nnew\n\n{record.END}\nb\n"
    assert record.fill(record.fill(page, "new"), "new") == record.fill(page, "new")
    with pytest.raises(ValueError, match="no <!-- results -->"):
        record.fill("a", "new")


def test_the_docs_have_the_results_of_the_last_run_and_explain_each() -> None:
    page = record.DOCS.read_text()
    results = record.load()
    if results.rows:
        assert record.fill(page, results.block()) == page, f"{record.DOCS.name} is not what make bench wrote"
    explained = set(re.findall(r"`(\w+)`", page.partition(record.END)[2]))
    assert set(rows.expected(rows.DEFAULT_BENCHES)) <= explained


# The rounds.


def test_both_sides_take_turns() -> None:
    assert alternate(["a", "b"], ["x", "y"]) == ["a", "x", "b", "y"]
    assert alternate(["a", "b"], ["x", "y", "z", "u"]) == ["a", "x", "y", "b", "z", "u"]
    assert alternate(["a", "b"], []) == ["a", "b"]


def test_the_figure_is_the_median_over_the_rounds() -> None:
    assert median([{"ms": 9}, {"ms": 1}, {"ms": 2}], "ms") == 2


def test_the_last_object_that_was_printed_is_the_figure() -> None:
    assert last_object('hello\n{"a": 1}\n{"a": 2}\n[3]\nbye') == {"a": 2}
    assert last_object("nothing") is None


def contestant(name: str, code: str, **more: Any) -> Contestant:
    return Contestant(name, (sys.executable, "-c", code), **more)


def test_who_fails_twice_is_left_out_and_told() -> None:
    told: list[str] = []
    run = Run(2, short=True, interpreters={}, say=told.append)
    lines = run.contest(
        "b",
        [
            contestant("good", "print('{\"ms\": 1}')"),
            contestant("bad", "raise SystemExit('no luck')"),
            contestant("false", "print('{\"ms\": 1}')", objection=lambda line: f"{line['ms']} is too little"),
            Contestant("absent", ("/no/such/python",)),
        ],
    )
    assert lines == {"good": [{"ms": 1}] * 2} == run.lines["b"]
    assert run.left_out["b"].keys() == {"bad", "false", "absent"}
    assert "no luck" in run.left_out["b"]["bad"]
    assert "1 is too little" in run.left_out["b"]["false"]
    assert sum("left out" in line for line in told) == 3


# A script that starts a process in a session of its own, whose parent then ends; it says that one's id.
_STRAY = """
import subprocess, sys
code = "import subprocess as s; print(s.Popen(['sleep', '300'], start_new_session=True, stdout=s.DEVNULL).pid)"
pid = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.decode().strip()
print('{{"pid": ' + pid + '}}', flush=True)
{then}
"""
_DRIVER = """
import json, sys
sys.path.append({folder!r})
import processes
processes.GRACE_S = 0.1
processes.adopt_orphans()
try:
    print(json.dumps(processes.run([sys.executable, "-c", {script!r}], timeout_s={timeout})))
except processes.Failed as failure:
    print(failure)
"""


@pytest.mark.parametrize(("then", "timeout"), [("", 30), ("import time; time.sleep(300)", 2)])
def test_nothing_is_left_of_a_script_however_it_ends(then: str, timeout: int, tmp_path: Path) -> None:
    driver = _DRIVER.format(folder=str(BENCHMARKS), script=_STRAY.format(then=then), timeout=timeout)
    mark = uuid.uuid4().hex
    environment = {**os.environ, leaks.MARK: mark, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", driver], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    line = last_object(done.stdout)
    if then:
        assert "gave no figure in 2 s" in done.stdout
    else:
        assert line
        assert line["left_running"] == 1
    assert leaks.marked_processes(mark) == []
    assert list(tmp_path.iterdir()) == []


# The peers.


def test_peers_are_found_by_their_variables_and_in_the_folder(tmp_path: Path) -> None:
    for name in ("torch", "ray"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    assert rivals.interpreters({}, tmp_path) == {name: f"{tmp_path}/{name}/bin/python" for name in ("torch", "ray")}
    given = {"SHOAL_PEER_TORCH": "/mine", "SHOAL_PEER_RAY": "", "SHOAL_PEER_MXNET": "/other"}
    assert rivals.interpreters(given, tmp_path) == {"torch": "/mine", "mxnet": "/other"}


def test_each_peer_has_an_environment_and_a_script() -> None:
    assert len({peer.name for peer in rivals.PEERS}) == len(rivals.PEERS)
    for peer in rivals.PEERS:
        assert peer.environment in rivals.BY_NAME
        assert os.access(BENCHMARKS / "peers" / peer.script, os.R_OK)


def test_more_variables_are_as_many_bytes() -> None:
    shapes = even_shapes(10_000)
    assert len(shapes) == 10_000
    assert 4 * sum(length for (length,) in shapes) == workload.DENSE_BYTES == 105_971_712
    assert {length for (length,) in shapes} == {2649, 2650}


# Models.


class Fake(Run):
    """A run whose contestants take so many milliseconds, by the end of their names."""

    def __init__(self, times: dict[str, list[float]], torch: str = "") -> None:
        self.told: list[str] = []
        super().__init__(3, short=True, interpreters={"torch": torch} if torch else {}, say=self.told.append)
        self.times = times

    def contest(self, bench: str, contestants: Any, *, rounds: int | None = None) -> Any:
        ends = {each.name: each.name.rpartition(", ")[2] for each in contestants}
        return {
            name: [{"ms_per_step": ms} for ms in self.times[end]] for name, end in ends.items() if end in self.times
        }


def test_a_model_is_compared_with_the_faster_of_the_layouts_and_each_round_is_told() -> None:
    run = Fake({"Shoal": [40, 60, 50], "channels first": [30, 30, 30], "channels last": [20, 24, 25]}, torch="python")
    assert nn.on_cpu(run, "resnet18") == [Row("resnet18_cpu", 50, "ms", "ResNet-18, torch, channels last", 24, 0.48)]
    assert run.told == ["resnet18_cpu: ratio of each round: 0.50, 0.40, 0.50"]


def test_without_torch_the_row_says_so_and_is_not_missed() -> None:
    run = Fake({"Shoal": [50]})
    found = nn.on_cpu(run, "resnet18")
    assert found == [Row("resnet18_cpu", 50, "ms", "no torch is given", None, None)]
    others = [name for name in rows.expected(["nn"]) if name != "resnet18_cpu"]
    assert rows.missing(found, ["nn"], peers=True, skipped=run.skipped) == others


def test_a_torch_that_failed_is_missed() -> None:
    run = Fake({"Shoal": [50]}, torch="python")
    assert "resnet18_cpu" in rows.missing(nn.on_cpu(run, "resnet18"), ["nn"], peers=True, skipped=run.skipped)
    assert nn.on_cpu(Fake({}), "resnet18") == []


@pytest.mark.parametrize("name", nn_workload.MODELS)
def test_both_sides_models_have_as_many_parameters(name: str) -> None:
    work = nn_workload.MODELS[name]
    kept = nn_step.model(name).variables(work.image).values()
    count = sum(math.prod(variable.shape) for variable in kept if variable.trainable)
    assert nn.objection({"parameters": count, "loss": 2.0}, work) == ""
    assert "parameters" in nn.objection({"parameters": count + 1, "loss": 2.0}, work)
    assert "finite" in nn.objection({"parameters": count, "loss": None}, work)


def test_a_step_is_timed_by_the_median_after_two_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = [9, 9, 3, 1, 2, 1, 5, 2, 2]
    now = [0.0]

    def step() -> float:
        now[0] += durations.pop(0)
        return float(len(durations))

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert nn_workload.measure(step, short=False) == (2, 0)


def test_the_rows_of_a_gpu_are_those_of_its_script_and_are_skipped_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"images_per_s_alone": 200.0, "images_per_s_cluster": 190.0, "images_per_s_torch": 250.0}
    alone, cluster = nn.gpu_rows(Fake({}), rates)
    assert (alone.peer, alone.ratio, alone.holds) == ("torch", 0.8, None)
    assert (cluster.peer, cluster.ratio, cluster.holds) == ("Shoal, alone", 0.95, True)

    del rates["images_per_s_torch"]
    run = Fake({})
    assert [row.ratio for row in nn.gpu_rows(run, rates)] == [None, 0.95]
    assert run.skipped.keys() == {"gpu_resnet50_alone"}

    def none(wish: str) -> None:
        raise errors.DeviceUnavailable(f"device {wish} is not here", device=wish)

    monkeypatch.setattr(nn, "choose_device", none)
    run = Fake({})
    assert nn.on_gpu(run) == []
    assert run.skipped == dict.fromkeys(nn.ON_GPU, "device cuda:0 is not here")


# Strategies.


def test_curves_count_the_samples_of_pushes_that_count() -> None:
    steps = [(1.0, True), (2.0, False), (3.0, True), (3.5, True)]
    found = compare_strategies.measured(steps, [(0.5, 2.0), (3.0, 1.0), (4.0, 0.3), (5.0, 0.5), (6.0, 0.2)])
    assert [(it["seconds"], it["samples"]) for it in found["curve"][:3]] == [(0.5, 0), (3.0, 64), (4.0, 96)]
    assert (found["steps"], found["counted"], found["last_s"]) == (4, 3, 3.5)
    assert strategies_page.reached(found, 0.4) == {"seconds": 6.0, "samples": 96, "loss": 0.2}  # 0.3 does not last
    assert strategies_page.reached(found, 0.1) is None


def test_the_page_has_the_kept_runs_of_strategies() -> None:
    kept = strategies_page.kept()["runs"]
    settings = list(compare_strategies.settings())
    assert {(it.part, it.name, it.workers, it.slowed) for it in settings} == {
        (run["part"], run["name"], run["workers"], run["slowed"]) for run in kept
    }
    page = strategies_page.PAGE.read_text()
    for part, table in strategies_page.TABLES.items():
        assert table([run for run in kept if run["part"] == part]) in page
    assert all(": " in strategies_page.told(run) for run in kept)

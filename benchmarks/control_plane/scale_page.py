"""The tables and the chart of docs/explanation/scale.md, from benchmarks/results/scale.json: python scale_page.py."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import throughput_model as model
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "scale.json"
PAGE = ROOT / "docs" / "explanation" / "scale.md"
CHART = ROOT / "docs" / "images" / "scale.svg"
# Everything between the two is generated.
BEGIN, END = "<!-- begin: tables of `make scale` -->", "<!-- end: tables of `make scale` -->"
# Colors and dashes that color-blind readers and printers distinguish.
_LINES = {10.0: ("#d55e00", "--"), 25.0: ("#0072b2", "-")}
# Seconds of heartbeat timeout for which the coordinator's load is shown.
_TIMEOUTS_S = (10.0, 30.0)


def kept() -> dict[str, Any]:
    """Returns the result of the last `make scale`."""
    result: dict[str, Any] = json.loads(RESULT.read_text())
    return result


def renew() -> None:
    """Writes the tables into the page, and the chart."""
    result = kept()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(result)}\n{END}{after}")
    draw(model.Constants.measured(result))


def tables(result: Mapping[str, Any]) -> str:
    """Returns the generated part of the page."""
    constants = model.Constants.measured(result)
    parts = [_run(result), _control_plane(result), _constants(constants, result), _coordinator(constants)]
    parts += [_case(case, constants) for case in model.CASES]
    return "\n".join(parts)


def _run(result: Mapping[str, Any]) -> str:
    host, date = result["machine"], result["date"].partition("T")[0]
    return (
        f"Measured on {date} on one machine: {host['cpu']}, {host['cores']} cores, {host['memory_gb']:g} GB, "
        f"Python {host['python']}, grpcio {host['versions']['grpcio']}. "
        f"Its load before the run was {host['load_before']:g}.\n"
    )


def _control_plane(result: Mapping[str, Any]) -> str:
    found = result["control_plane"]
    # Targets are for the full size. A target that was missed begins with the name of its measurement (`scale.misses`).
    full = found["workers"] == 1_000 and found["servers"] == 100
    missed = {text.partition(" ")[0] for text in found["missed"]}
    heartbeat_timeout_s = found["heartbeat_timeout_s"]
    rows = [
        (
            "from Submit until every server has admitted every worker",
            f"{found['admitted_s']:g} s",
            "under 10 s",
            "admitted_s",
        ),
        ("from Submit until Join has told every worker to begin", f"{found['joined_s']:g} s", "under 10 s", "joined_s"),
        ("coordinator CPU time for the entry of all workers", f"{found['admission_cpu_s']:g} s", "", ""),
        ("heartbeat interval that the coordinator tells members", f"{found['interval_s']:.2f} s", "", ""),
        ("heartbeats and reports that the coordinator answers", f"{found['calls_per_s']:g} /s", "", ""),
        ("coordinator CPU while all train", f"{found['coordinator_cores']:g} cores", "under 0.3", "coordinator_cores"),
        ("coordinator CPU time of a heartbeat or report while all train", f"{found['us_per_call']} µs", "", ""),
        *_bare_call(found),
        (
            f"cost of a heartbeat or report with {found['watchers']} watchers of another job, relative to the cost "
            "without watchers",
            f"{found['watched_ratio']:g}",
            "at most 1.1",
            "watched_ratio",
        ),
        ("coordinator CPU time of a heartbeat while no job runs", f"{found['us_per_heartbeat']} µs", "", ""),
        (
            "from the last call of a silent worker until every server has released it",
            f"{found['released_after_s']:g} s",
            f"at most {heartbeat_timeout_s + 1:g} s",
            "released_after_s",
        ),
        (
            "from Cancel until every worker knows that its job was cancelled",
            f"{found['cancel_s']:g} s",
            "under 3 s",
            "cancel_s",
        ),
        ("workers declared lost by mistake", f"{found['declared_lost']}", "0", "declared_lost"),
    ]
    title = (
        f"### The control plane\n\n{found['workers']:,} simulated workers and {found['servers']} simulated servers, "
        f"heartbeat timeout {heartbeat_timeout_s:g} s.\n"
    )
    lines = []
    for what, value, target, name in rows:
        met = ("no" if name in missed else "yes") if target else ""
        lines.append(f"| {what} | {value} | {f'{target} | {met}' if full else ' | '} |\n")
    return f"{title}\n| what | measured | target | met |\n| --- | --- | --- | --- |\n" + "".join(lines)


def _bare_call(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns the row of what gRPC itself costs; none if the run is older than this measurement."""
    if "us_per_bare_call" not in found:
        return []
    what = "CPU time of a call without any work at a plain gRPC server in Python, at 400 calls a second"
    return [(what, f"{found['us_per_bare_call']} µs", "", "")]


def _constants(constants: model.Constants, result: Mapping[str, Any]) -> str:
    cases, limits = result["data_plane"], result["data_plane"]["limits"]
    small, in_turn = cases["small_asynchronous"], cases["small_synchronous"]
    pull, push = constants.server_pull, constants.server_push
    rows = [
        ("server: a pull and a push of 170 KB, asynchronous", f"{1e3 * small['server_step_s']:.2f} ms"),
        ("server: a pull and a push of 170 KB, synchronous, two workers",
         f"{1e3 * in_turn['server_step_s']:.2f} ms"),
        ("server: the call of a pull, without its bytes", f"{1e3 * pull.call_s:.2f} ms"),
        ("server: the call of a push, without its bytes", f"{1e3 * push.call_s:.2f} ms"),
        ("server: the call of a pull, if there are several servers", f"{1e3 * constants.staged_pull_s:.2f} ms"),
        ("server: the calls of a push, if there are several servers (a push is staged, then committed)",
         f"{1e3 * constants.staged_push_s:.2f} ms"),
        ("server: a byte of a pull", f"{1e9 * pull.byte_s:.2f} ns"),
        ("server: a byte of a push, asynchronous", f"{1e9 * push.byte_s:.2f} ns"),
        ("server: a byte of a push, synchronous", f"{1e9 * constants.synchronous_byte_s:.2f} ns"),
        ("worker: a byte, pulled or pushed", f"{1e9 * constants.worker_byte_s:.2f} ns"),
        ("coordinator: a report", f"{1e3 * constants.report_s:.2f} ms"),
        ("loopback TCP", f"{limits['loopback_tcp_gb_per_s']:.2f} GB/s"),
        ("memcpy, one thread", f"{limits['memcpy_gb_per_s']:.1f} GB/s"),
    ]  # fmt: skip
    title = "### The constants\n\nAll rows but the last two are CPU times. The last two are speeds of the machine.\n"
    return f"{title}\n| what | measured |\n| --- | --- |\n" + "".join(f"| {what} | {value} |\n" for what, value in rows)


def _coordinator(constants: model.Constants) -> str:
    columns = " | ".join(f"cores at a heartbeat timeout of {timeout_s:g} s" for timeout_s in _TIMEOUTS_S)
    rows = []
    for workers in model.WORKERS:
        cores = " | ".join(
            f"{model.coordinator_cores(workers, heartbeat_timeout_s, constants.report_s):.2f}"
            for heartbeat_timeout_s in _TIMEOUTS_S
        )
        rows.append(f"| {workers:,} | {cores} |\n")
    title = "### The coordinator\n\nThe cores that heartbeats and reports need, as the model computes them.\n"
    return f"{title}\n| members | {columns} |\n| --: |{' --: |' * len(_TIMEOUTS_S)}\n" + "".join(rows)


def _case(case: model.Case, constants: model.Constants) -> str:
    links = model.LINKS_GBIT
    columns = " | ".join(f"steps/s, {link:g} Gbit/s | samples/s | bottleneck" for link in links)
    rows = []
    for estimates in model.table(case, constants):
        cells = " | ".join(
            f"{_count(it.steps_per_s)} | {_count(it.samples_per_s)} | {it.bottleneck}" for it in estimates
        )
        rows.append(f"| {estimates[0].workers:,} | {estimates[0].servers:,} | {cells} |\n")
    servers = f"one server per {case.workers_a_server} workers" if case.workers_a_server else "one server"
    about = (
        f"{servers}, {case.server_cores} cores per server, {1e3 * case.compute_s:g} ms of computation a step, "
        f"batches of {case.batch:,} samples, heartbeat timeout {case.heartbeat_timeout_s:g} s."
    )
    head = f"| workers | servers | {columns} |\n| --: | --: |{' --: | --: | --- |' * len(links)}\n"
    return f"### {case.name}\n\n{about[0].upper()}{about[1:]}\n\n{head}" + "".join(rows)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def shown(constants: model.Constants) -> str:
    """Returns a digest of the figures of the chart, which does not depend on the version of matplotlib."""
    rows = [model.table(case, constants, tuple(_LINES)) for case in model.CASES]
    return hashlib.sha256(
        ",".join(f"{it.steps_per_s:.6g}" for row in rows for estimates in row for it in estimates).encode()
    ).hexdigest()


def draw(constants: model.Constants, path: Path = CHART) -> None:
    """Writes an SVG with a panel for each case. Its description names the figures that it shows (`shown`)."""
    figure = Figure(figsize=(4.2 * len(model.CASES), 4.0), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(model.CASES), squeeze=False)[0], model.CASES, strict=True):
        ideal = [workers / case.compute_s for workers in model.WORKERS]
        axes.plot(model.WORKERS, ideal, ":", color="#777777", label="computation alone")
        for link, (colour, dashes) in _LINES.items():
            steps = [model.estimate(case, workers, link, constants).steps_per_s for workers in model.WORKERS]
            axes.plot(model.WORKERS, steps, dashes, color=colour, marker=".", label=f"{link:g} Gbit/s")
        axes.set(title=case.name, xlabel="workers", ylabel="steps/s of all workers", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    with mpl.rc_context({"svg.hashsalt": "shoal"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": shown(constants)})


if __name__ == "__main__":
    renew()

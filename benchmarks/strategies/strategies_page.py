"""Tables and charts of docs/explanation/choosing-a-strategy.md, from benchmarks/results/strategies.json."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "strategies.json"
PAGE = ROOT / "docs" / "explanation" / "choosing-a-strategy.md"
IMAGES = ROOT / "docs" / "images"
TARGET = 0.4  # held-out loss of the tables
# Colors and dashes that color-blind readers and printers distinguish.
_STYLES = [
    ("#0072b2", "-"),
    ("#56b4e9", "--"),
    ("#009e73", "-."),
    ("#d55e00", "-"),
    ("#cc79a7", ":"),
    ("#000000", "--"),
    ("#e69f00", "-"),
]

Run = Mapping[str, Any]


def kept() -> dict[str, Any]:
    """Returns the kept results; empty if there are none."""
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}
    return found


def keep(result: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Writes results in place of those of the same parts, and renews the page and its charts."""
    others = [run for run in kept()["runs"] if run["part"] not in parts]
    runs = [run | {"date": result["date"]} for run in result["runs"]]
    text = json.dumps({**result, "runs": [*others, *runs]}, indent=1)
    RESULT.write_text(text + "\n")
    renew()


def renew() -> None:
    """Writes the tables into the page, and the charts."""
    result = kept()
    text = PAGE.read_text()
    for part, table in TABLES.items():
        begin, end = f"<!-- {part} -->", f"<!-- /{part} -->"
        before, marked, rest = text.partition(begin)
        if marked and (runs := _of(result, part)):
            text = f"{before}{begin}\n\n{table(runs)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)
    _draw_strategies(_of(result, "strategies"))
    _draw_scaling(_of(result, "scaling"))


def told(run: Run) -> str:
    """Returns one line about a run."""
    last = f", loss {run['curve'][-1]['loss']:.3f}" if run["curve"] else ""
    slowed = ", one slowed" if run["slowed"] else ""
    count = f"{run['counted']} of {run['steps']} steps count, {1e3 * run['last_s'] / _steps_each(run):.0f} ms a step"
    return f"{run['part']}: {run['name']}, {run['workers']} workers{slowed}: {count}{last}"


def reached(run: Run, target: float = TARGET) -> Mapping[str, float] | None:
    """Returns the first point of a curve whose loss is at most the target, as is that of the next point."""
    curve = run["curve"]
    for now, after in zip(curve, [*curve[1:], curve[-1]], strict=True):
        if max(now["loss"], after["loss"]) <= target:
            found: Mapping[str, float] = now
            return found
    return None


def _steps_each(run: Run) -> float:
    return max(1.0, float(run["steps"]) / float(run["workers"]))


def _of(result: Mapping[str, Any], part: str) -> list[Run]:
    return [run for run in result["runs"] if run["part"] == part]


def _strategies(runs: Sequence[Run]) -> str:
    head = (
        f"| strategy | workers | samples/s | s until loss {TARGET:g} | samples until loss {TARGET:g} | last loss |\n"
        "| --- | --- | ---: | ---: | ---: | ---: |\n"
    )
    return head + "".join(_strategy(run, "one slowed" if run["slowed"] else "alike") for run in runs)


def _strategy(run: Run, workers: str) -> str:
    found = reached(run)
    at = (f"{found['seconds']:.1f}", f"{found['samples']:,}") if found else ("not reached", "not reached")
    return f"| {run['name']} | {workers} | {_rate(run):,.0f} | {at[0]} | {at[1]} | {run['curve'][-1]['loss']:.3f} |\n"


def _rate(run: Run) -> float:
    return float(run["curve"][-1]["samples"] / run["curve"][-1]["seconds"])


def _scaling(runs: Sequence[Run]) -> str:
    alone = next(run for run in runs if run["workers"] == 1)
    head = (
        "| workers | learning rate | samples/s | times one worker | "
        f"samples until loss {TARGET:g} | s until loss {TARGET:g} |\n| ---: | --- | ---: | ---: | ---: | ---: |\n"
    )
    rows = []
    for run in runs:
        found = reached(run)
        at = (f"{found['samples']:,}", f"{found['seconds']:.1f}") if found else ("not reached", "not reached")
        rate = "of one worker" if run["workers"] == 1 else run["name"]
        times = _rate(run) / _rate(alone)
        rows.append(f"| {run['workers']} | {rate} | {_rate(run):,.0f} | {times:.2f} | {at[0]} | {at[1]} |\n")
    return head + "".join(rows)


def _servers(runs: Sequence[Run]) -> str:
    head = (
        "| case | ms a step | MB a step at the busiest server | at the least busy one in use | "
        "ms of processor a step, busiest server | pushes a step of a worker |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
    )
    return head + "".join(map(_server, runs))


def _server(run: Run) -> str:
    used = [it for it in run["servers"].values() if it["pushes"]]
    ms = 1e3 * run["last_s"] / _steps_each(run)
    if not used:
        return f"| {run['name']} | {ms:.0f} | - | - | - | 0 |\n"
    megabytes = sorted(it["bytes"] / run["steps"] / 1e6 for it in used)
    cpu = max(it["cpu_s"] for it in used) / run["steps"]
    pushes = max(it["pushes"] for it in used) / run["steps"]
    return f"| {run['name']} | {ms:.0f} | {megabytes[-1]:.1f} | {megabytes[0]:.1f} | {1e3 * cpu:.1f} | {pushes:.2f} |\n"


TABLES: Mapping[str, Callable[[Sequence[Run]], str]] = {
    "strategies": _strategies,
    "scaling": _scaling,
    "servers": _servers,
}


def _draw_strategies(runs: Sequence[Run]) -> None:
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    for row, slowed in zip(panels, (False, True), strict=True):
        chosen = [run for run in runs if run["slowed"] is slowed]
        names = [(run["name"], run) for run in chosen]
        workers = "one worker five times slower" if slowed else "four workers alike"
        _curves(row[0], names, "seconds", "seconds", workers)
        _curves(row[1], names, "samples", "samples of all workers, thousands", workers)
    panels[0][0].legend(fontsize="small")
    _save(figure, "strategies.svg")


def _draw_scaling(runs: Sequence[Run]) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    named = [(_scaled(run), run) for run in runs]
    _curves(left, named, "seconds", "seconds", "synchronous, by number of workers")
    _curves(right, named, "samples", "samples of all workers, thousands", "synchronous, by number of workers")
    left.legend(fontsize="small")
    _save(figure, "strategies-scaling.svg")


def _scaled(run: Run) -> str:
    return "1 worker" if run["workers"] == 1 else f"{run['workers']} workers, {run['name']}"


def _curves(axes: Axes, runs: Sequence[tuple[str, Run]], key: str, label: str, title: str) -> None:
    divisor = 1000 if key == "samples" else 1
    for (name, run), (colour, dashes) in zip(runs, cycle(_STYLES), strict=False):
        x = [point[key] / divisor for point in run["curve"]]
        axes.plot(x, [point["loss"] for point in run["curve"]], dashes, color=colour, label=name, linewidth=1.6)
    axes.set(title=title, xlabel=label, ylabel="loss on held-out images", yscale="log")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _save(figure: Figure, name: str) -> None:
    with mpl.rc_context({"svg.hashsalt": "shoal"}):
        figure.savefig(IMAGES / name, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    renew()

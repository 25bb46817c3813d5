"""Table and chart of docs/explanation/surviving-kills.md, from benchmarks/results/kills.json: python kills_page.py."""

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import schedule
import update_log
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "kills.json"
PAGE = ROOT / "docs" / "explanation" / "surviving-kills.md"
CHART = ROOT / "docs" / "images" / "kills.svg"
# Everything between the two is generated.
BEGIN, END = "<!-- begin: table of `make bench-kills` -->", "<!-- end: table of `make bench-kills` -->"
_WIDTH = 138  # of the page's lines
POINT_S = 5.0  # between two points of a curve
# The systems in the order of the table and the chart. Color-blind readers can distinguish their colors and dashes.
_STYLES = {
    "shoal-replicas": ("#0072b2", "-"),
    "shoal-checkpoints": ("#56b4e9", "--"),
    "torchft": ("#d55e00", "-."),
    "tensorflow": ("#e69f00", ":"),
}

Result = Mapping[str, Any]


def kept() -> list[Result]:
    """Returns the kept results, one for each system, in the order of the table; empty if there are none."""
    found: list[Result] = json.loads(RESULT.read_text()) if RESULT.exists() else []
    return sorted(found, key=lambda result: _place(result["key"]))


def keep(result: Result) -> None:
    """Writes the result of one system in place of its earlier one, and renews the page and its chart."""
    found = [*(it for it in kept() if it["key"] != result["key"]), result]
    RESULT.write_text(json.dumps(sorted(found, key=lambda it: _place(it["key"])), indent=1) + "\n")
    renew()


def renew() -> None:
    """Writes the table into the page, and the chart."""
    results = kept()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{rest.partition(END)[2]}")
    draw(results, CHART)


def share(result: Result) -> float:
    """Returns the useful samples per second with kills, relative to those of the undisturbed run."""
    return float(result["killed"]["samples_per_s"]) / float(result["undisturbed"]["samples_per_s"])


def share_of_before(result: Result) -> float:
    """Returns the useful samples from each kill to the next one, relative to the rate of the 5 s before the kill.

    The load of the machine changes less in this time than from one run to another. The figure means something only for
    a system that has recovered from each kill when the next one comes.
    """
    curve = result["killed"]["curve"]
    gained, expected = 0.0, 0.0
    for kill in schedule.kills(result["killed"]["seconds"]):
        first = round(kill.at_s / POINT_S)
        last = min(first + round(schedule.EVERY_S / POINT_S), len(curve) - 1)
        gained += curve[last] - curve[first]
        expected += (last - first) * (curve[first] - curve[first - 1])
    return gained / expected


def table(results: Sequence[Result]) -> str:
    """Returns the generated part of the page."""
    head = (
        "| system | samples/s, undisturbed | useful samples/s, with kills | share that is kept | updates undone | "
        "load of the machine, undisturbed and with kills |\n| --- | ---: | ---: | ---: | ---: | ---: |\n"
    )
    rows = "".join(map(_row, results))
    runs = "".join(f"{textwrap.fill(f'- {line}', _WIDTH, subsequent_indent='  ')}\n" for line in _runs(results))
    return f"{head}{rows}\n{_paired(results)}{runs}"


def _paired(results: Sequence[Result]) -> str:
    return "".join(
        textwrap.fill(
            f"{result['name']}: in the {schedule.EVERY_S:g} s after a kill, the job kept {share_of_before(result):.1%} "
            "of the rate of the 5 s before it. The load of the machine changes less in this time than between runs.",
            _WIDTH,
        )
        + "\n\n"
        for result in results
        if result["key"] == "shoal-replicas"
    )


def _row(result: Result) -> str:
    undisturbed, killed = result["undisturbed"], result["killed"]
    return (
        f"| {result['name']} | {undisturbed['samples_per_s']:,.0f} | {killed['samples_per_s']:,.0f} | "
        f"{share(result):.1%} | {killed['undone']:,} | "
        f"{undisturbed['load']:g}, {killed['load']:g} |\n"
    )


def _runs(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        host, killed = result["machine"], result["killed"]
        versions = {**host["versions"], **host["peers"]}
        used = [f"{name} {versions[name]}" for name in (result["key"].partition("-")[0],) if name in versions]
        counts = ", ".join(f"{name} {count}" for name, count in killed["victims"].items())
        lines.append(
            f"{result['name']}: {result['date'].partition('T')[0]}, {host['cpu']}, {host['cores']} cores, "
            f"{host['memory_gb']:g} GB, Python {host['python']}, {', '.join(used)}. {killed['kills']} kills in "
            f"{killed['seconds']:g} s ({counts}), and {result['undisturbed']['seconds']:g} s undisturbed."
        )
    return lines


def shown(results: Sequence[Result]) -> str:
    """Returns a digest of the figures of the chart, which does not depend on the version of matplotlib."""
    values = [[it["key"], it["name"], it["undisturbed"]["samples_per_s"], it["killed"]["curve"]] for it in results]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes an SVG: useful samples against time, and per second. Its description names the figures (`shown`)."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _curves(curves, results)
    _bars(bars, results)
    with mpl.rc_context({"svg.hashsalt": "shoal"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": shown(results)})


def _curves(axes: Axes, results: Sequence[Result]) -> None:
    for result in results:
        killed = result["killed"]
        times = [min(POINT_S * number, killed["seconds"]) for number in range(len(killed["curve"]))]
        colour, dashes = _style(result["key"])
        samples = [it / 1000 for it in killed["curve"]]
        axes.plot(times, samples, dashes, color=colour, label=result["name"], linewidth=1.8)
    seconds = max((result["killed"]["seconds"] for result in results), default=0.0)
    for role, marker in (("server", "v"), ("worker", "|")):
        at = [kill.at_s for kill in schedule.kills(seconds) if kill.role == role]
        axes.plot(at, [0] * len(at), marker, color="black", markersize=6, linestyle="none", label=f"a {role} is killed")
    axes.set(title="useful samples, with a kill every 15 s", xlabel="seconds", ylabel="useful samples, thousands")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")


def _bars(axes: Axes, results: Sequence[Result]) -> None:
    ordered = results[::-1]
    names = [result["name"].replace(", ", ",\n").replace("TensorFlow ", "TensorFlow\n") for result in ordered]
    undisturbed = [result["undisturbed"]["samples_per_s"] for result in ordered]
    axes.barh(names, undisturbed, color="#e4e7ea", label="undisturbed")
    rates = [result["killed"]["samples_per_s"] for result in ordered]
    bars = axes.barh(names, rates, height=0.5, color=[_style(result["key"])[0] for result in ordered])
    labels = [f"{rate:,.0f} ({share(result):.0%})" for rate, result in zip(rates, ordered, strict=True)]
    axes.bar_label(bars, labels, padding=4)
    axes.set(title="useful samples/s (grey: undisturbed)", xlabel="samples/s of four workers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(schedule.WORKERS * update_log.BATCH / update_log.COMPUTE_S, color="#777777", linestyle=":")


def _style(key: str) -> tuple[str, str]:
    return _STYLES.get(key, ("#000000", "-"))


def _place(key: str) -> int:
    return [*_STYLES, key].index(key)


if __name__ == "__main__":
    renew()

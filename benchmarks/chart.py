"""Chart that compares Shoal with each peer on the dense and the small workload."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from harness import median
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from processes import Line

_PANELS = (("dense", "gb_per_s", "dense step, GB/s"), ("small", "steps_per_s", "small step, steps/s"))
_OURS, _THEIRS = "#1f77b4", "#b8bec6"


def draw(rounds: Mapping[str, Mapping[str, Sequence[Line]]], path: Path) -> None:
    """Writes an SVG with a panel for each of the two workloads that has run. The same figures give the same bytes."""
    panels = [(key, title, rounds[bench]) for bench, key, title in _PANELS if rounds.get(bench)]
    if not panels:
        return
    bars = [len(lines) for _, _, lines in panels]
    figure = Figure(figsize=(9, 0.9 * len(panels) + 0.32 * sum(bars)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=bars)[:, 0]
    for ax, (key, title, lines) in zip(axes, panels, strict=True):
        _panel(ax, key, title, lines)
    with mpl.rc_context({"svg.hashsalt": "shoal"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(ax: Axes, key: str, title: str, lines: Mapping[str, Sequence[Line]]) -> None:
    medians = sorted((median(seen, key), name) for name, seen in lines.items())
    values, names = [value for value, _ in medians], [name for _, name in medians]
    colours = [_OURS if name.startswith("Shoal") else _THEIRS for name in names]
    bars = ax.barh(names, values, color=colours)
    ax.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in values], padding=6)
    for name in names:  # each round
        ax.plot([line[key] for line in lines[name]], [name] * len(lines[name]), ".", color="black", markersize=3)
    ax.set_title(title, loc="left")
    ax.margins(x=0.12)
    ax.spines[["top", "right"]].set_visible(False)

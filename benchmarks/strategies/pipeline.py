"""Bubble and memory of pipelines: python benchmarks/strategies/pipeline.py [--keep].

The stages of the first part are equal: a layer of each sleeps as if it computed. So they do not take the cores from
each other, and the share of a step in which they wait is that of the schedule. The second part measures the bytes that
the stages hold. With --keep, it writes benchmarks/results/pipeline.json, and renews the tables and the chart of
docs/explanation/pipelines.md.
"""

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from shoal_distribute import PipelineStrategy, keras
from shoal_distribute.keras.tensor import recorded

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "pipeline.json"
PAGE = ROOT / "docs" / "explanation" / "pipelines.md"
IMAGE = ROOT / "docs" / "images" / "pipelines.svg"
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SCHEDULES = ("gpipe", "1f1b")
FORWARD_S = 0.1
WIDTH, BATCH = 256, 512

Row = dict[str, Any]


class Sleeping(keras.layers.Layer):
    """Waits as if it computed: twice as long in the backward pass, as most layers do."""

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: ARG002 - acts the same
        def pull(dy: Any) -> list[Any]:
            time.sleep(2 * FORWARD_S)
            return [dy]

        time.sleep(FORWARD_S)
        return recorded(inputs.array, (inputs,), pull)


def bubble(stages: int, micro_batches: int, schedule: str) -> Row:
    """Returns the bubble of equal stages.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches.
        schedule: name of the schedule.
    """
    x = np.zeros((64, 4), np.float32)
    settings: Row = {"stages": stages, "micro_batches": micro_batches, "schedule": schedule}
    with PipelineStrategy(**settings, cut=[2] * stages) as strategy:
        with strategy.scope():
            layers = [layer for _ in range(stages) for layer in (keras.layers.Dense(4), Sleeping())]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile("sgd", "mse")
        model.fit(x, x, batch_size=64, epochs=1, verbose=0)  # the first step counts what it saves
        before = strategy.timings()
        model.fit(x, x, batch_size=64, epochs=1, verbose=0)
        after = strategy.timings()
    waited = sum(b.wait_s - a.wait_s for a, b in zip(before.stages, after.stages, strict=True))
    found = waited / ((after.seconds - before.seconds) * stages)
    return settings | {"bubble": found, "model": (stages - 1) / (micro_batches + stages - 1)}


def memory(micro_batches: int, schedule: str, *, recompute: bool) -> Row:
    """Returns the most bytes that each of four stages holds, and the micro-batches.

    Args:
        micro_batches: number of micro-batches.
        schedule: name of the schedule.
        recompute: whether activations are computed again.
    """
    x = np.zeros((BATCH, WIDTH), np.float32)
    settings: Any = {"micro_batches": micro_batches, "schedule": schedule, "recompute": recompute}
    with PipelineStrategy(stages=4, cut=[3, 3, 3, 3], **settings) as strategy:
        with strategy.scope():
            layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(12)]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers])
            model.compile("sgd", "mse")
        model.fit(x, x, batch_size=BATCH, epochs=1, verbose=0)
        stages = strategy.timings().stages
    peaks, held = [it.peak_bytes for it in stages], [it.peak_held for it in stages]
    return settings | {"peak_bytes": peaks, "held": held, "fixed_bytes": stages[0].fixed_bytes}


def measured() -> dict[str, Any]:
    """Returns all rows."""
    bubbles = [
        bubble(stages, micro_batches, schedule)
        for stages in (2, 3, 4)
        for micro_batches in (1, 4, 8, 16)
        for schedule in SCHEDULES
    ]
    kinds = [("gpipe", False), ("1f1b", False), ("1f1b", True)]
    peaks = [memory(count, schedule, recompute=recompute) for count in MICRO_BATCHES for schedule, recompute in kinds]
    return {"date": datetime.now(UTC).date().isoformat(), "bubble": bubbles, "memory": peaks}


def renew() -> None:
    """Writes the tables into the page, and the chart."""
    result = json.loads(RESULT.read_text())
    text = PAGE.read_text()
    for part, table in (("bubble", _bubble_table(result)), ("memory", _memory_table(result))):
        before, _, rest = text.partition(f"<!-- {part} -->")
        text = f"{before}<!-- {part} -->\n\n{table}\n\n<!-- /{part} -->{rest.partition(f'<!-- /{part} -->')[2]}"
    PAGE.write_text(text)
    _draw(result)


def _bubble_table(result: Row) -> str:
    lines = ["| stages | micro-batches | (p-1)/(m+p-1) | GPipe | 1F1B |", "| ---: | ---: | ---: | ---: | ---: |"]
    rows = result["bubble"]
    for gpipe, other in zip(rows[::2], rows[1::2], strict=True):
        size = f"{gpipe['stages']} | {gpipe['micro_batches']}"
        lines.append(f"| {size} | {gpipe['model']:.3f} | {gpipe['bubble']:.3f} | {other['bubble']:.3f} |")
    return "\n".join(lines)


def _memory_table(result: Row) -> str:
    lines = ["| micro-batches | schedule | MB at most, by stage | micro-batches held, by stage |"]
    lines.append("| ---: | --- | --- | --- |")
    for row in result["memory"]:
        peaks = ", ".join(f"{it / 1e6:.2f}" for it in row["peak_bytes"])
        held = ", ".join(map(str, row["held"]))
        lines.append(f"| {row['micro_batches']} | {_label(row)} | {peaks} | {held} |")
    return "\n".join(lines)


def _label(row: Row) -> str:
    name = "GPipe" if row["schedule"] == "gpipe" else "1F1B"
    return f"{name}, recomputed" if row.get("recompute") else name


def _draw(result: Row) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for stages, colour in ((2, "#0072b2"), (3, "#009e73"), (4, "#d55e00")):
        rows = [it for it in result["bubble"] if it["stages"] == stages]
        counts = np.linspace(1, 16, 100)
        left.plot(counts, (stages - 1) / (counts + stages - 1), color=colour, label=f"{stages} stages, (p-1)/(m+p-1)")
        for schedule, mark in zip(SCHEDULES, "ox", strict=True):
            own = [it for it in rows if it["schedule"] == schedule]
            left.plot([it["micro_batches"] for it in own], [it["bubble"] for it in own], mark, color=colour)
    left.set_title("bubble (o GPipe, x 1F1B)", loc="left")
    for label, style in (("GPipe", "-"), ("1F1B", "--"), ("1F1B, recomputed", ":")):
        own = [it for it in result["memory"] if _label(it) == label]
        right.plot(
            [it["micro_batches"] for it in own], [max(it["peak_bytes"]) / 1e6 for it in own], f"k{style}", label=label
        )
    right.set_title("MB at the stage that holds most, 4 stages", loc="left")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set_xlabel("micro-batches")
        ax.legend(frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.hashsalt": "shoal"}):
        figure.savefig(IMAGE, format="svg", metadata={"Date": None})


def main() -> None:
    """Measures, and prints or keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the result, the page's tables and its chart")
    keep = parser.parse_args().keep
    result = measured()
    text = json.dumps(result, indent=1)
    print(text)
    if keep:
        RESULT.write_text(text + "\n")
        renew()


if __name__ == "__main__":
    main()

"""The demo: a local cluster trains a digits classifier once in each consistency mode.

    make demo        or: python examples/demo.py --out runs/demo

Writes the curves to OUT/loss.png and the results to OUT/summary.json. The exit status is 1 if a job fails, or if the
accuracy of a mode on the held-out images is below 97%.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from digits import Digits
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.table import Table

import shoal
from shoal.consistency import Consistency
from shoal.events import MetricsReported, StateChanged

# To train in another mode, add it to this list.
MODES: tuple[Consistency, ...] = (shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(4))
SERVERS = WORKERS = 2
HIDDEN = 512
EPOCHS, BATCH = 20, 64
# A rate that decays with the version tolerates stale gradients, and suits all modes.
OPTIMIZER = shoal.optim.Adam(shoal.optim.ExponentialLR(3e-3, gamma=0.997))
TARGET_ACCURACY = 0.97  # of the held-out images; guessing reaches 0.1

Curve = list[tuple[int, float]]  # samples seen, and the loss there


@dataclass(frozen=True)
class Row:
    """One line of the table, and of summary.json."""

    mode: str
    steps: int
    samples_per_s: float
    test_accuracy: float
    staleness_p50: float
    staleness_max: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a digits classifier in every consistency mode.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for loss.png and summary.json")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the data in each mode")
    arguments = parser.parse_args()
    out: Path = arguments.out
    console = Console()
    try:
        results = run(console, arguments.epochs)
    except shoal.ShoalError as error:
        console.print(f"the demo failed: {error}", style="bold red", markup=False)
        return 1
    rows = [row for row, _ in results]
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n")
    draw(results).savefig(out / "loss.png", dpi=150)
    console.print(table(rows))
    console.print(f"curves in {out / 'loss.png'}, results in {out / 'summary.json'}", highlight=False)
    poor = [f"{row.mode} ({row.test_accuracy:.1%})" for row in rows if row.test_accuracy < TARGET_ACCURACY]
    if poor:
        console.print(f"below {TARGET_ACCURACY:.0%} of held-out images right: {', '.join(poor)}", style="bold red")
    return 1 if poor else 0


def run(console: Console, epochs: int) -> list[tuple[Row, Curve]]:
    """Starts a cluster, trains in each mode, and stops the cluster."""
    console.print(f"starting a coordinator, {SERVERS} servers and {WORKERS} workers ...")
    program = Digits(HIDDEN)
    cluster = shoal.LocalCluster(SERVERS, WORKERS, path=[Path(__file__).parent])
    with cluster, cluster.client() as client, live(console) as bars:
        tasks = [(mode, bars.add_task(str(mode), start=False, metrics="waits")) for mode in MODES]
        return [train(client, program, mode, epochs, bars, task) for mode, task in tasks]


def train(
    client: shoal.Client, program: Digits, mode: Consistency, epochs: int, bars: Progress, task: TaskID
) -> tuple[Row, Curve]:
    """Trains one job to its end, shows its progress, and evaluates it."""
    job = client.submit(
        shoal.Job(
            "digits:Digits",
            workers=WORKERS,
            consistency=mode,
            optimizer=OPTIMIZER,
            settings={"hidden": HIDDEN},
            epochs=epochs,
            batch_size=BATCH,
        )
    )
    bars.start_task(task)
    curve = list(watch(job, bars, task))
    done = job.result().progress
    accuracy = shoal.evaluate(program, job.pull())["accuracy"]
    job.drop()
    row = Row(str(mode), done.steps, round(done.samples_per_s, 1), accuracy, done.staleness_p50, done.staleness_max)
    return row, curve


def watch(job: shoal.JobHandle, bars: Progress, task: TaskID) -> Iterator[tuple[int, float]]:
    """Yields the points of the curve during training, and updates the progress bar."""
    for event in job.events():
        match event:
            case StateChanged(state=state) if not state.finished:
                bars.update(task, metrics=state.value)
            case MetricsReported(progress=now, values=values) if "loss" in values:
                metrics = (
                    f"loss {values['loss']:.4f}  {now.samples_per_s:,.0f} samples/s  "
                    f"staleness p50 {now.staleness_p50:g}, max {now.staleness_max}"
                )
                bars.update(task, completed=now.samples, total=now.total_samples or None, metrics=metrics)
                yield now.samples, values["loss"]


def live(console: Console) -> Progress:
    """Returns a display with one progress bar for each mode."""
    return Progress(
        TextColumn("{task.description:<6}"),
        BarColumn(bar_width=12),
        TaskProgressColumn(),
        TextColumn("{task.fields[metrics]}"),
        console=console,
    )


def table(rows: Iterable[Row]) -> Table:
    table = Table(title=f"Digits on {SERVERS} servers and {WORKERS} workers", title_justify="left")
    table.add_column("mode")
    for heading in ("steps", "samples/s", "test accuracy", "staleness p50", "max"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            f"{row.steps:,}",
            f"{row.samples_per_s:,.0f}",
            f"{row.test_accuracy:.4f}",
            f"{row.staleness_p50:g}",
            f"{row.staleness_max}",
        )
    return table


def draw(results: Sequence[tuple[Row, Curve]]) -> Figure:
    """Draws the loss over the samples seen, one curve for each mode."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    styles = cycle(zip(("#0072b2", "#d55e00", "#009e73", "#cc79a7"), ("-", "--", "-.", ":"), strict=True))
    for (row, curve), (colour, dashes) in zip(results, styles, strict=False):
        samples, losses = zip(*smoothed(curve), strict=True)
        label = f"{row.mode}: test accuracy {row.test_accuracy:.3f}"
        axes.plot([count / 1000 for count in samples], losses, dashes, color=colour, linewidth=1.8, label=label)
    axes.set(
        yscale="log",
        xlabel="samples seen, thousands",
        ylabel="training loss (cross-entropy, smoothed)",
        title=f"Handwritten digits: {SERVERS} servers, {WORKERS} workers",
    )
    axes.grid(which="major", alpha=0.3)
    axes.legend()
    return figure


def smoothed(curve: Curve, weight: float = 0.5) -> Curve:
    """Returns the exponential moving average of a curve. Each point is a worker's mean since its last report."""
    mean, smooth = curve[0][1], []
    for samples, loss in curve:
        mean += weight * (loss - mean)
        smooth.append((samples, mean))
    return smooth


if __name__ == "__main__":
    sys.exit(main())

"""Helpers for `fashion.py` and `fine_tuning.py`: functions that train a job with a progress bar and draw its curve."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

import shoal
from shoal.callbacks import ProgressBar
from shoal.events import EvaluationEnded, Event, MetricsReported

# Colors and dashes that are distinct for color-blind readers and in black and white.
STYLES = [("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", ":")]


@dataclass
class Curve:
    """The evaluations of a job, collected as a callback.

    Attributes:
        name: name of the curve.
        samples: number of samples that the job had trained on at each evaluation.
        accuracy: accuracy on the held-out samples at each evaluation.
        loss: loss on the held-out samples at each evaluation.
        seconds: duration of the job.
    """

    name: str
    samples: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    seconds: float = 0.0
    _seen: int = field(default=0, repr=False)

    def __call__(self, event: Event) -> None:
        """Adds an event of the job."""
        match event:
            case MetricsReported(progress=progress):
                self._seen = progress.samples
            case EvaluationEnded(result=result):
                self.samples.append(self._seen)
                self.accuracy.append(result.values["accuracy"])
                self.loss.append(result.values["loss"])

    @property
    def last(self) -> float:
        """The final accuracy."""
        return self.accuracy[-1]


def trained(client: shoal.Client, job: shoal.Job, name: str) -> Curve:
    """Trains a job to its end, with a progress bar.

    Args:
        client: client of the cluster.
        job: the job.
        name: name of the curve.

    Returns:
        The curve of the job's evaluations.

    Raises:
        JobFailed: the job failed.
    """
    curve = Curve(name)
    with ProgressBar(job) as bar:
        result = client.submit(job).wait(callbacks=[curve, bar])
    curve.seconds = result.seconds
    curve.samples[-1] = result.progress.samples
    return curve


def save(out: Path, name: str, title: str, panels: Sequence[tuple[str, Iterable[Curve]]]) -> None:
    """Writes NAME.png, with one panel for each group of curves, and NAME.json.

    Args:
        out: folder for the files.
        name: name of the files.
        title: title of the picture.
        panels: heading and curves of each panel.
    """
    out.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(4.5 * len(panels) + 1.5, 4.5), layout="constrained")
    figure.suptitle(title)
    record = {}
    for axes, (heading, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve, (colour, dashes) in zip(curves, cycle(STYLES), strict=False):
            thousands = [count / 1000 for count in curve.samples]
            label = f"{curve.name}: {curve.last:.3f}"
            axes.plot(thousands, curve.accuracy, dashes, color=colour, marker=".", linewidth=1.8, label=label)
            record[curve.name] = {key: value for key, value in asdict(curve).items() if not key.startswith("_")}
        axes.set(title=heading, xlabel="samples seen, thousands", ylabel="accuracy on held-out images")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(out / f"{name}.png", dpi=120)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

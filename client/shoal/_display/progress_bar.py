"""A job's events as people watch them: a bar on a terminal, and lines for what happens beside training."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from shoal import status
from shoal._display.formatting import checkpoint, duration, evaluation, first_line
from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.job import Job


class ProgressBar:
    """Shows a job's progress: share and rate of the data, time left, loss, and the latest and best evaluation.

    States, checkpoints, evaluations and log lines are printed above it, a line each; without a terminal, they are all.

        with shoal.callbacks.ProgressBar(handle.status().job) as bar:
            handle.wait(callbacks=[bar])

    Args:
        job: whose name, number of steps and metric it shows. None: it does without.
        console: where to; None: standard error.
    """

    def __init__(self, job: Job | None = None, *, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._name = f"{job.name} " if job else ""
        self._steps = job.max_steps * job.workers if job else 0
        self._metric = job.evaluation.metric if job and job.evaluation else ""
        self._evaluated = ""
        self._best: status.Evaluation | None = None
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"{self._name}pending", total=None, figures="", left=None)

    def __call__(self, event: Event) -> None:
        """Shows an event; the one of the job's end takes the bar away from what comes later."""
        if not self._bar.live.is_started:
            self._bar.start()
        match event:
            case StateChanged():
                self._enter(event)
            case CheckpointEnded():
                self._print(self._name + checkpoint(event))
            case EvaluationEnded():
                self._print(self._name + evaluation(event, self._metric))
                self._note(event)
            case LogLine():
                self._print(str(event))
            case MetricsReported():
                self._advance(event.progress)

    def close(self) -> None:
        """Leaves the bar as it is, and the terminal to others."""
        self._bar.stop()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, event: StateChanged) -> None:
        entered = f"{self._name}{event.state.value}"
        self._bar.update(self._task, description=entered)
        failed = event.state.finished and event.state is not status.JobState.SUCCEEDED
        why = "" if failed else first_line(event.reason)  # of a failure, whoever waits is told more
        self._print(entered + (f": {why}" if why else ""))
        if event.state.finished:
            self.close()

    def _note(self, event: EvaluationEnded) -> None:
        if event.best:
            self._best = event.result
        values = [it.values[self._metric] for it in (event.result, self._best) if it and self._metric in it.values]
        self._evaluated = f"{self._metric} {'/'.join(f'{value:.3g}' for value in values)}" if values else ""

    def _advance(self, now: status.Progress) -> None:
        # What is known to end: the data if there is any, else the steps.
        completed, total = (now.samples, now.total_samples) if now.total_samples else (now.steps, self._steps)
        # Short, so that the line fits 80 columns: the metric (latest/best), or staleness (median/largest).
        loss, rate = f"loss {now.loss:.3g}", f"{now.samples_per_s:,.0f}/s"
        stale = f"stale {now.staleness_p50:g}/{now.staleness_max}"
        figures = " · ".join((loss, self._evaluated, rate) if self._evaluated else (loss, rate, stale))
        self._bar.update(self._task, completed=completed, total=total or None, figures=figures, left=now.seconds_left)

    def _print(self, line: str) -> None:
        self._bar.console.print(Text(line), soft_wrap=True)


class _TimeLeft(TimeRemainingColumn):
    """As the cluster knows it; of a job without data, as the bar's pace has it."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        return super().render(task) if left is None else Text(duration(left), style="progress.remaining")


__all__ = ["ProgressBar"]

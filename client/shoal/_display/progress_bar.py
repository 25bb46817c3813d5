"""Progress of a job on a terminal: a bar, and above it one line for each state, checkpoint, evaluation and log line."""

from types import NoneType, TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from shoal import status
from shoal._display.formatting import (
    first_line,
    format_checkpoint,
    format_duration,
    format_evaluation,
    format_time,
)
from shoal._system import check_type
from shoal._system.terminal import printable
from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.job import Job


class ProgressBar:
    """Shows the progress of a job: completed share, rate, time left, loss, and the latest and best evaluation.

    States, checkpoints, evaluations and log lines are printed above the bar, one line each, with the time of day of
    each. Without a terminal, only these lines are printed.

        with shoal.callbacks.ProgressBar(handle.status().job) as bar:
            handle.wait(callbacks=[bar])

    Args:
        job: the job, for its name, number of steps and metric. None means that these are not shown.
        console: the output. None means standard error.

    Raises:
        BadRequest: `job` is not a `Job`.
    """

    def __init__(self, job: Job | None = None, *, console: Console | None = None) -> None:
        check_type("job", job, (Job, NoneType), "a shoal.Job, such as handle.status().job, or None")
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
            TextColumn("{task.fields[metrics]}", markup=False, table_column=Column(no_wrap=True)),
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"{self._name}pending", total=None, metrics="", left=None)

    def __call__(self, event: Event) -> None:
        """Shows an event. The end of the job stops the bar."""
        if not self._bar.live.is_started:
            self._bar.start()
        match event:
            case StateChanged():
                self._enter(event)
            case CheckpointEnded():
                self._print(event, self._name + format_checkpoint(event))
            case EvaluationEnded():
                self._print(event, self._name + format_evaluation(event, self._metric))
                self._note(event)
            case LogLine():
                self._print(event, str(event))
            case MetricsReported():
                self._advance(event.progress)

    def close(self) -> None:
        """Stops updating the bar and releases the terminal."""
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
        why = "" if failed else first_line(event.reason)  # `wait` raises a failure with its reason
        self._print(event, entered + (f": {why}" if why else ""))
        if event.state.finished:
            self.close()

    def _note(self, event: EvaluationEnded) -> None:
        if event.best:
            self._best = event.result
        values = [it.values[self._metric] for it in (event.result, self._best) if it and self._metric in it.values]
        self._evaluated = f"{self._metric} {'/'.join(f'{value:.3g}' for value in values)}" if values else ""

    def _advance(self, now: status.Progress) -> None:
        # The end is known for data if the job has any, else for steps.
        completed, total = (now.samples, now.total_samples) if now.total_samples else (now.steps, self._steps)
        # Short, to fit 80 columns: the metric (latest/best), or staleness (median/maximum).
        loss, rate = f"loss {now.loss:.3g}", f"{now.samples_per_s:,.0f}/s"
        stale = f"stale {now.staleness_p50:g}/{now.staleness_max}"
        metrics = " · ".join((loss, self._evaluated, rate) if self._evaluated else (loss, rate, stale))
        self._bar.update(self._task, completed=completed, total=total or None, metrics=metrics, left=now.seconds_left)

    def _print(self, event: Event, line: str) -> None:
        self._bar.console.print(Text(printable(f"{format_time(event.time)} {line}")), soft_wrap=True)


class _TimeLeft(TimeRemainingColumn):
    """The time left: the cluster's estimate, or the bar's for a job without data."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        return super().render(task) if left is None else Text(format_duration(left), style="progress.remaining")


__all__ = ["ProgressBar"]

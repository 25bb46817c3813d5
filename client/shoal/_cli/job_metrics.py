"""The command `metrics`, which shows the latest metrics that each worker of a job has reported."""

from collections.abc import Iterable

from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import counted, records
from shoal.events import Event, MetricsReported


@options.connected
def metrics(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the metrics in the latest report of each worker: the loss, and the program's or session's own metrics.

    Each value is the mean over the worker's steps since its previous report. Workers report about twice a second in a
    small cluster, and less often in a large one.
    "wait_share", from the workers of programs, is the share of the time in which a worker neither computed nor
    evaluated. The table only counts the workers that have left the job; --json shows them.
    """
    with Output(as_json) as out, connect() as client:
        handle = client.job(job)
        members = {it.worker: it for it in handle.status().members}
        record = records.metrics(job, latest_reports(handle.events(follow=False)), members)
        if as_json:
            out.record(record)
            return
        there = [it for it in record["workers"] if it["state"] != "left"]
        rows: list[tuple[list[str], Row]] = [
            ([it["worker"], str(it["rank"]), f"{it['step']:,}", name, f"{it['values'][name]:.4g}"], {})
            for it in there
            for name in sorted(it["values"], key=lambda name: (name != "loss", name))
        ]
        left = len(record["workers"]) - len(there)
        notes = [f"{counted(left, 'worker')} left; `shoal metrics {job} --json` has all"] if left else []
        title = f"{job}: means of the latest reports" if rows else f"{job} has no metrics: no worker has reported any"
        out.rows(title, ["worker", "rank", "step", "metric", "value"], rows, notes=notes)


def latest_reports(events: Iterable[Event]) -> list[MetricsReported]:
    """Returns the last report with metrics of each worker, in the order of the workers' names."""
    latest = {it.worker: it for it in events if isinstance(it, MetricsReported) and it.values}
    return [latest[worker] for worker in sorted(latest)]


__all__ = ["latest_reports", "metrics"]

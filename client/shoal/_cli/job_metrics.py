"""The command `metrics`, which shows what the workers of a job have reported last."""

from collections.abc import Iterable

from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import records
from shoal.events import Event, MetricsReported


@options.connected
def metrics(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Shows the metrics in the latest report of each worker: the loss, and the program's or session's own metrics.

    Each value is the mean over the worker's steps since its report before. Workers report about twice a second.
    "wait_share", from the workers of programs, is the share of the time in which a worker neither computed nor
    evaluated.
    """
    with Output(as_json) as out, connect() as client:
        reports = latest_reports(client.job(job).events(follow=False))
        if as_json:
            out.record(records.metrics(job, reports))
            return
        rows: list[tuple[list[str], Row]] = [
            ([it.worker, f"{it.step:,}", name, f"{it.values[name]:.4g}"], {})
            for it in reports
            for name in sorted(it.values, key=lambda name: (name != "loss", name))
        ]
        title = f"{job}: means of the latest reports" if rows else f"{job} has no metrics: no worker has reported any"
        out.rows(title, ["worker", "step", "metric", "value"], rows)


def latest_reports(events: Iterable[Event]) -> list[MetricsReported]:
    """Returns the last report with metrics of each worker, in the order of the workers' names."""
    latest = {it.worker: it for it in events if isinstance(it, MetricsReported) and it.values}
    return [latest[worker] for worker in sorted(latest)]


__all__ = ["latest_reports", "metrics"]

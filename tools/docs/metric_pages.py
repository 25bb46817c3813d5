"""The reference of the metrics, from the registries of roles that run in this process."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from markdown_text import code, page, table, text
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from shoal._role import process_metrics
from shoal._training.participant import Report
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute.collectives import GroupTimings, RankTimes, StageTimes
from shoal_distribute.pipeline.stage_metrics import StageMetrics
from shoal_distribute.pipeline.timings import PipelineTimings
from shoal_distribute.rank_metrics import RankMetrics
from shoal_server.process import Server, ServerConfig
from shoal_worker.daemon import WorkerConfig
from shoal_worker.messages import TrainerReport
from shoal_worker.process import start_worker

ROLES = ("coordinator", "server", "worker")


@dataclass(frozen=True, order=True)
class MetricFamily:
    """A metric as a scrape names it.

    Attributes:
        name: with `_total` if it is a counter, and `_info` if it is an info.
        kind: counter, gauge, histogram or info.
        labels: the names of its labels, without a histogram's `le`.
        help: the text of its HELP line.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def families() -> dict[str, list[MetricFamily]]:
    """Returns the metrics of each role, a rank and a pipeline by name. Starts a coordinator, a server and a worker."""
    registries = {role: CollectorRegistry() for role in ROLES}
    for role, registry in registries.items():
        process_metrics.register_insecure(registry, role, insecure=False)
        process_metrics.register_expiry(registry, role, None)
    with ExitStack() as running:
        coordinator = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), registries["coordinator"])
        running.callback(coordinator.stop)
        server = Server(ServerConfig("server-0", coordinator.address), registries["server"])
        running.callback(server.stop)
        worker = start_worker(WorkerConfig(coordinator.address, "worker-0", device="cpu"), registries["worker"])
        running.callback(worker.stop)
        # A GPU's memory has a family only while a trainer uses one.
        worker._metrics.add(TrainerReport(Report(), {}, {"used": 1, "pool": 2, "limit": 0}))
        registries["rank"] = CollectorRegistry()
        registries["rank"].register(RankMetrics(lambda: RankTimes(stage=StageTimes(0, 1, 1)), GroupTimings, int))
        registries["pipeline"] = CollectorRegistry()
        registries["pipeline"].register(StageMetrics(lambda: PipelineTimings(0, 0.0, ())))
        return {role: sorted(_of(registry)) for role, registry in registries.items()}


def _of(registry: CollectorRegistry) -> Iterator[MetricFamily]:
    # Only a collector knows its labels: a family of a labelled metric that was never counted has no sample.
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if isinstance(collector, MetricWrapperBase):
                labels = collector._labelnames
            else:
                seen = dict.fromkeys(name for it in family.samples for name in it.labels)
                labels = getattr(family, "_labelnames", ()) or [*seen]
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            yield MetricFamily(
                f"{family.name}{suffix}",
                family.type,
                tuple(label for label in labels if label != "le"),
                family.documentation,
            )


def pages() -> dict[str, str]:
    """Returns the page of all metrics."""
    lines = [
        "# Metrics",
        "",
        "Every role serves its metrics at `http://HOST:PORT/metrics`, at the address of `--metrics-listen` (port 7090",
        "in containers). Units are seconds, bytes and versions. No label names a job, a member or a user, so the",
        "number of series does not grow with use. There are also the metrics `process_*` and `python_*` that",
        "every Python process has. A rank is a process of a `MultiWorkerMirroredStrategy` or of a",
        "`MultiWorkerPipelineStrategy`. Only a rank that has trained a stage has metrics of a stage. A pipeline is",
        "the process of a `PipelineStrategy`. They have no endpoints of their own: see",
        "[Groups of ranks](../../how-to/groups-of-ranks.md#find-the-straggler) and",
        "[Pipelines](../../explanation/pipelines.md#find-the-slowest-stage).",
        "[Monitoring](../../how-to/monitoring.md) says how to collect them.",
        "",
    ]
    for role, found in families().items():
        rows = (
            [code(family.name), family.kind, ", ".join(map(code, family.labels)), text(family.help)] for family in found
        )
        lines += [f"## {role.capitalize()}", *table(["metric", "type", "labels", "meaning"], rows)]
    return {"reference/metrics/index.md": page(lines)}

"""Real roles in this process, and the metrics that each of them exports."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from shoal._role import process_metrics
from shoal._training.participant import Report
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute.collectives import GroupTimings, RankTimes, StageTimes
from shoal_distribute.pipeline.stage_metrics import StageMetrics
from shoal_distribute.pipeline.timings import PipelineTimings
from shoal_distribute.rank_metrics import RankMetrics
from shoal_server.process import Server, ServerConfig
from shoal_worker.daemon import WorkerConfig
from shoal_worker.messages import TrainerReport
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.process import start_worker

# What Prometheus adds to each target, by deploy/prometheus/prometheus.yml.
TARGET_LABELS = frozenset({"component", "instance", "job"})


@dataclass(frozen=True)
class Scraped:
    """The result of a scrape of a role.

    Attributes:
        text: text of the page.
        types: types of metric families, by name.
        labels: the values of each label, by the name of a sample.
    """

    text: str
    types: Mapping[str, str]
    labels: Mapping[str, Mapping[str, set[str]]]

    @classmethod
    def of(cls, text: str) -> "Scraped":
        types: dict[str, str] = {}
        labels: dict[str, dict[str, set[str]]] = {}
        for family in text_string_to_metric_families(text):
            types[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
            for sample in family.samples:
                values = labels.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    values.setdefault(label, set()).add(value)
        return cls(text, types, labels)


@contextmanager
def roles() -> Iterator[dict[str, Scraped]]:
    """Yields the scrapes of a coordinator, a server, a worker, a rank and a pipeline."""
    registries = {role: CollectorRegistry() for role in ("coordinator", "server", "worker")}
    with ExitStack() as running:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client types it not
        running.callback(enable_created_metrics)
        for role, registry in registries.items():
            process_metrics.register(registry)
            process_metrics.register_insecure(registry, role, insecure=False)
            process_metrics.register_expiry(registry, role, None)
        coordinator = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), registries["coordinator"])
        running.callback(coordinator.stop)
        server = Server(ServerConfig("server-0", coordinator.address), registries["server"])
        running.callback(server.stop)
        with grpc.insecure_channel(server.address) as channel:  # a control call, which the server counts
            ParameterServerStub(channel).DropShards(pb.DropShardsRequest(job="none"), timeout=10)
        made: list[WorkerMetrics] = []

        def noted(*given: Any) -> WorkerMetrics:
            made.append(WorkerMetrics(*given))
            return made[-1]

        with mock.patch("shoal_worker.process.WorkerMetrics", noted):
            worker = start_worker(WorkerConfig(coordinator.address, "worker-0", device="cpu"), registries["worker"])
        running.callback(worker.stop)
        # As of a trainer on a GPU, which a machine need not have.
        made[0].add(TrainerReport(Report(), {}, {"used": 1, "pool": 2, "limit": 0}))
        registries["rank"] = CollectorRegistry()
        registries["rank"].register(RankMetrics(lambda: RankTimes(stage=StageTimes(0, 1, 1)), GroupTimings, int))
        registries["pipeline"] = CollectorRegistry()
        registries["pipeline"].register(StageMetrics(lambda: PipelineTimings(0, 0.0, ())))
        yield {role: Scraped.of(generate_latest(registry).decode()) for role, registry in registries.items()}

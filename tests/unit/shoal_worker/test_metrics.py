"""Metrics of a worker."""

from prometheus_client import CollectorRegistry

from shoal._rpc.retries import Retries
from shoal._training.participant import Report
from shoal_worker.messages import TrainerReport, decode, encode
from shoal_worker.metrics import WorkerMetrics


def test_memory_of_the_device_is_shown_while_a_trainer_has_some() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "cuda:0 Fake")

    def shown() -> dict[str, float | None]:
        name = "shoal_worker_device_memory_bytes"
        return {kind: registry.get_sample_value(name, {"kind": kind}) for kind in ("used", "pool", "limit")}

    report = Report(step=1, accepted=1, rejected=0, dropped=0, samples=4, values={}, staleness={})
    assert shown() == {"used": None, "pool": None, "limit": None}
    metrics.trainer_started()
    for used in (5, 7):
        metrics.add(TrainerReport(report, {}, {"used": used, "pool": 10, "limit": 20}))
    assert shown() == {"used": 7, "pool": 10, "limit": 20}
    metrics.trainer_ended()
    assert shown() == {"used": None, "pool": None, "limit": None}


def test_retries_are_the_trainers_and_the_daemons_own() -> None:
    registry, own = CollectorRegistry(), Retries()
    metrics = WorkerMetrics(registry, "cpu", own)

    def shown() -> dict[str, float | None]:
        name = "shoal_worker_retries_total"
        return {called: registry.get_sample_value(name, {"called": called}) for called in ("coordinator", "server")}

    assert shown() == {"coordinator": 0, "server": 0}
    own.count("coordinator")
    assert shown() == {"coordinator": 1, "server": 0}
    sent = decode(encode(TrainerReport(Report(), {}, retries={"coordinator": 2, "server": 3})))
    assert isinstance(sent, TrainerReport)
    metrics.add(sent)
    own.count("coordinator")
    assert shown() == {"coordinator": 4, "server": 3}


def test_trainers_are_counted_while_they_run() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "cpu")
    shown = [registry.get_sample_value("shoal_worker_trainers")]
    for change in (metrics.trainer_started, metrics.trainer_ended):
        change()
        shown.append(registry.get_sample_value("shoal_worker_trainers"))
    assert shown == [0, 1, 0]

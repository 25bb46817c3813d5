"""Generator of the dashboard that Grafana is provisioned with. Run it after a change.

python deploy/grafana/dashboard.py
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "shoal.json"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # columns of Grafana's grid
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: title.
        queries: PromQL expressions by legend.
        unit: unit, by its name in Grafana.
        text: description, which Grafana shows beside the title.
        kind: type of the panel: timeseries or stat.
        alarm: threshold at which the panel turns red, or None for a panel without a threshold.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    alarm: float | None = None


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{_RATE}))"


def _quantile(histogram: str, share: float, by: str = "") -> str:
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"


def _quantiles(histogram: str) -> dict[str, str]:
    return {"p50": _quantile(histogram, 0.5), "p99": _quantile(histogram, 0.99)}


def _grown(counter: str) -> str:
    return f"sum(increase({counter}[$__range]))"


def _mean(phase: str) -> str:
    return f"{_rate(f'shoal_worker_{phase}_seconds_sum')} / {_rate('shoal_worker_compute_seconds_count')}"


# Each row answers a question, the most urgent first.
ROWS: dict[str, list[Panel]] = {
    "Is it training?": [
        Panel("Running jobs", {"": 'sum(shoal_coordinator_jobs{state="running"})'}, kind="stat"),
        Panel("Trainers", {"": "sum(shoal_worker_trainers)"}, kind="stat"),
        Panel(
            "Servers alive",
            {"": 'sum(shoal_coordinator_members{role="server",state="alive"})'},
            kind="stat",
        ),
        Panel(
            "Workers alive and wanted",
            {
                "alive": 'sum(shoal_coordinator_members{role="worker",state="alive"})',
                "wanted": "sum(shoal_coordinator_wanted_workers)",
                "waiting to enter a job": "sum(shoal_coordinator_waiting_workers)",
            },
            kind="stat",
        ),
        Panel(
            "Processes that cannot be scraped",
            {"": 'count(up{component=~"coordinator|server|worker"} == 0) or vector(0)'},
            kind="stat",
            alarm=1,
        ),
        Panel("Jobs by state", {"{{state}}": "sum by (state) (shoal_coordinator_jobs)"}),
        Panel(
            "Pushes by outcome",
            {"{{outcome}}": _rate("shoal_server_pushes_total", "outcome")},
            "ops",
            "Pushes per second. Only accepted pushes train the model.",
        ),
    ],
    "How fast?": [
        Panel("Samples per second", {"samples": _rate("shoal_worker_samples_total")}, "short", "Sum over all workers."),
        Panel("Steps per second", {"steps": _rate("shoal_worker_steps_total")}, "short", "Sum over all workers."),
        Panel("Updates per second", {"updates": _rate("shoal_server_updates_total")}, "short", "Sum over all servers."),
        Panel(
            "Time of a batch, by phase",
            {phase: _mean(phase) for phase in ("pull", "read", "compute", "push", "wait", "evaluate")},
            "s",
            "Mean over all workers, in seconds per batch.",
        ),
        Panel("Time of a pull, without the wait", _quantiles("shoal_server_pull_seconds"), "s"),
        Panel("Time that pulls wait for the consistency mode", _quantiles("shoal_server_pull_wait_seconds"), "s"),
        Panel(
            "Time of a push and of a commit",
            {"p99 {{call}}": _quantile("shoal_server_push_seconds", 0.99, "call")},
            "s",
            "A push that is sent while the gradients are computed takes as long as the computation.",
        ),
        Panel("Time to apply an update", _quantiles("shoal_server_apply_seconds"), "s"),
    ],
    "Who is the straggler?": [
        Panel(
            "Own time of a batch, by worker",
            {"{{instance}}": "instance:shoal_batch_seconds:mean5m"},
            "s",
            "Time to read and compute a batch, mean over five minutes. The highest line is the slowest worker.",
        ),
        Panel(
            "Own time of a batch, relative to the median worker",
            {"{{instance}}": "instance:shoal_batch_slowness:ratio"},
            "short",
            "1 means as fast as the median worker. Valid only while a single job runs: batches of jobs differ.",
            alarm=1.5,
        ),
    ],
    "How stale?": [
        Panel("Staleness in versions", _quantiles("shoal_server_staleness_versions"), "short", alarm=64),
        Panel(
            "Waiting pulls",
            {"{{instance}}": "shoal_server_waiting_pulls"},
            "short",
            "Pulls that wait for their consistency mode.",
        ),
    ],
    "Is anything lost?": [
        Panel(
            "Lost members",
            {"{{role}}": "sum by (role) (increase(shoal_coordinator_members_lost_total[$__range]))"},
            kind="stat",
            alarm=1,
        ),
        Panel(
            "Restarts of jobs",
            {
                "{{reason}}": "sum by (reason) (increase(shoal_coordinator_restarts_total[$__range]))",
                "continued with backups": "sum(increase(shoal_coordinator_failovers_total[$__range]))",
                "groups without backup": "max(shoal_coordinator_groups_without_backup)",
            },
            kind="stat",
            text="lost: a server was lost, and work is repeated. draining: the job was saved first.",
            alarm=1,
        ),
        Panel(
            "Failed jobs",
            {"": _grown('shoal_coordinator_jobs_ended_total{state="failed"}')},
            kind="stat",
            alarm=1,
        ),
        Panel("Crashed trainers", {"": _grown("shoal_worker_trainer_crashes_total")}, kind="stat", alarm=1),
        Panel(
            "Hung trainers and quarantines",
            {
                "hung": _grown("shoal_coordinator_hung_trainers_total"),
                "quarantined: {{reason}}": (
                    "sum by (reason) (increase(shoal_coordinator_quarantines_total[$__range]))"
                ),
            },
            kind="stat",
            text="Workers that stopped while others waited, and workers that get no assignment of a job for a while.",
            alarm=1,
        ),
        Panel(
            "Refused pushes, by reason",
            {"{{reason}}": f"sum by (reason) (increase(shoal_server_rejected_pushes_total{_RATE}))"},
        ),
        Panel(
            "Late, repeated and refused pushes per second",
            {
                "late": _rate("shoal_worker_dropped_total"),
                "NaN or Inf": _rate("shoal_worker_rejected_total"),
                "repeated": _rate("shoal_server_duplicate_pushes_total"),
            },
            "ops",
        ),
        Panel(
            "Retried calls per second",
            {
                "workers to {{called}}": _rate("shoal_worker_retries_total", "called"),
                "coordinator to server": _rate("shoal_coordinator_retries_total"),
            },
            "ops",
        ),
        Panel(
            "Log lines: dropped per second, and waiting",
            {
                "dropped": _rate("shoal_worker_log_lines_dropped_total"),
                "waiting": "sum(shoal_worker_log_lines_waiting)",
            },
        ),
    ],
    "Checkpoints": [
        Panel(
            "Jobs with a failed checkpoint",
            {"": "sum(shoal_coordinator_jobs_with_failed_checkpoint)"},
            kind="stat",
            alarm=1,
        ),
        Panel(
            "Age of a job's newest checkpoint",
            {"": "max(shoal_coordinator_oldest_checkpoint_seconds)"},
            "s",
            kind="stat",
        ),
        Panel("Size of the newest checkpoints", {"": "sum(shoal_coordinator_checkpoint_bytes)"}, "bytes", kind="stat"),
        Panel(
            "Age divided by the checkpoint interval",
            {"age": "max(shoal_coordinator_checkpoint_age_ratio)"},
            "short",
            "Largest ratio of all jobs. At 1 the next checkpoint is due.",
            alarm=3,
        ),
        Panel("Time to write a checkpoint", _quantiles("shoal_coordinator_checkpoint_seconds"), "s"),
        Panel(
            "Checkpoints by outcome",
            {"{{outcome}}": f"sum by (outcome) (increase(shoal_coordinator_checkpoints_total{_RATE}))"},
        ),
    ],
    "Where do the bytes go?": [
        Panel("Values sent to workers", {"{{transport}}": _rate("shoal_server_sent_bytes_total", "transport")}, "Bps"),
        Panel(
            "Gradients received by servers",
            {"{{transport}}": _rate("shoal_server_received_bytes_total", "transport")},
            "Bps",
        ),
        Panel(
            "Open lanes",
            {"{{transport}}": "sum by (transport) (shoal_server_lanes)"},
            "short",
            "Connections of workers to servers.",
        ),
        Panel(
            "Shared-memory segments",
            {"{{outcome}}": f"sum by (outcome) (increase(shoal_server_segments_total{_RATE}))"},
            "short",
            "Without a segment, a worker uses TCP, which is slower: see docs/how-to/compose.md, Shared memory.",
        ),
    ],
    "Memory and queues": [
        Panel(
            "Memory of servers",
            {
                "{{instance}} in use": 'process_resident_memory_bytes{component="server"}',
                "{{instance}} limit": "shoal_server_memory_limit_bytes",
            },
            "bytes",
        ),
        Panel(
            "Memory of shards, of values that readers use, and of free buffers",
            {
                "{{instance}} shards": "shoal_server_shard_bytes",
                "{{instance}} readers": "shoal_server_reader_bytes",
                "{{instance}} free buffers": "shoal_server_buffer_pool_free_bytes",
            },
            "bytes",
        ),
        Panel("GPU memory", {"{{instance}} {{kind}}": "shoal_worker_device_memory_bytes"}, "bytes"),
        Panel("Shards", {"{{instance}}": "shoal_server_shards"}),
        Panel("Staged pushes", {"{{instance}}": "shoal_server_staged_pushes"}),
        Panel("Pushes that wait for a permit", {"{{instance}}": "shoal_server_waiting_pushes"}),
        Panel(
            "Norms that another server does not take",
            {"{{instance}}": "shoal_server_undelivered_norms"},
            text="The steps of their jobs wait: see docs/how-to/optimizer-settings.md, Clipping of gradients.",
        ),
        Panel("Time that pushes wait for a permit", _quantiles("shoal_server_push_wait_seconds"), "s"),
        Panel(
            "Threads for gRPC calls",
            {
                "{{instance}} {{pool}} busy": "shoal_server_busy_threads",
                "{{instance}} {{pool}} queued": "shoal_server_queued_calls",
            },
        ),
        Panel(
            "Pending effects",
            {"{{effect}}": "sum by (effect) (shoal_coordinator_pending_effects)"},
            text="Calls of the coordinator to servers that may not be done yet.",
        ),
        Panel(
            "Time of a write to the coordinator's store",
            {
                **_quantiles("shoal_coordinator_store_write_seconds"),
            },
            "s",
        ),
        Panel(
            "Heartbeat interval",
            {"": "max(shoal_coordinator_heartbeat_interval_seconds)"},
            "s",
            "Interval of heartbeats and reports of members. It grows with the number of members.",
        ),
        Panel("Unwritten decisions of the coordinator", {"decisions": "sum(shoal_coordinator_unwritten_changes)"}),
        Panel(
            "Refusals by limit",
            {
                "coordinator {{limit}}": "sum by (limit) (increase(shoal_coordinator_limits_exceeded_total[$__range]))",
                "servers {{limit}}": "sum by (limit) (increase(shoal_server_limits_exceeded_total[$__range]))",
            },
            text="Requests, calls and connections that were refused: see docs/reference/limits.",
        ),
        Panel(
            "Control calls and refused callers",
            {
                "{{call}} {{outcome}}": (
                    "sum by (call, outcome) (increase(shoal_coordinator_audit_records_total[$__range]))"
                ),
                "servers {{call}} {{outcome}}": (
                    "sum by (call, outcome) (increase(shoal_server_audit_records_total[$__range]))"
                ),
                "lost records": "sum(increase(shoal_coordinator_audit_records_lost_total[$__range]))",
                "lost records of servers": "sum(increase(shoal_server_audit_records_lost_total[$__range]))",
            },
            text="What the audit log records: see docs/how-to/security.md.",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in the classic JSON model of Grafana 10 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for question, row in ROWS.items():
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": question, "collapsed": False, "gridPos": place})
        y += 1
        for height, width, line in _lines(row):
            for number, panel in enumerate(line):
                place = {"h": height, "w": width, "x": number * width, "y": y}
                panels.append({"id": len(panels) + 1, "gridPos": place, **_drawn(panel)})
            y += height
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "shoal",
        "title": "Shoal",
        "description": "Is it training? How fast? Who is the straggler? How stale? Is anything lost?",
        "tags": ["shoal"],
        "schemaVersion": 38,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [{**source, "current": {"text": "Prometheus", "value": "prometheus"}}]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _lines(row: list[Panel]) -> list[tuple[int, int, list[Panel]]]:
    """Returns a row's panels in lines, each with its height and panel width: first the figures, then the curves."""
    stats = [panel for panel in row if panel.kind == "stat"]
    curves = [panel for panel in row if panel.kind != "stat"]
    lines = [(4, _WIDTH // len(stats), stats)] if stats else []
    across = 3 if len(curves) % 3 == 0 else 2
    return lines + [(8, _WIDTH // across, curves[at : at + across]) for at in range(0, len(curves), across)]


def _drawn(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm is not None:
        steps.append({"color": "red", "value": panel.alarm})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "min": 0}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "auto"}
    elif panel.alarm is not None:
        defaults["custom"] = {"thresholdsStyle": {"mode": "dashed"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """Returns the text of the dashboard file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())

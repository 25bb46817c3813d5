"""Writes the dashboard that Grafana is provisioned with. Run it after a change.

python deploy/grafana/dashboard.py
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "shoal.json"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH = 24  # of Grafana's grid
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: a title that says what it shows, and what it is drawn of.

    Attributes:
        title: of it.
        queries: PromQL by legend.
        unit: as Grafana calls it.
        text: shown beside the title.
        kind: timeseries or stat.
        alarm: the value from which on it is red; None: nothing is.
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
    return {"half": _quantile(histogram, 0.5), "99 of 100": _quantile(histogram, 0.99)}


def _grown(counter: str) -> str:
    return f"sum(increase({counter}[$__range]))"


def _mean(phase: str) -> str:
    return f"{_rate(f'shoal_worker_{phase}_seconds_sum')} / {_rate('shoal_worker_compute_seconds_count')}"


# Each row answers a question, the most urgent first.
ROWS: dict[str, list[Panel]] = {
    "Is it training?": [
        Panel("Jobs that run", {"": 'sum(shoal_coordinator_jobs{state="running"})'}, kind="stat"),
        Panel("Trainers", {"": "sum(shoal_worker_trainers)"}, kind="stat"),
        Panel(
            "Servers alive",
            {"": 'sum(shoal_coordinator_members{role="server",state="alive"})'},
            kind="stat",
        ),
        Panel(
            "Workers alive, and wanted",
            {
                "alive": 'sum(shoal_coordinator_members{role="worker",state="alive"})',
                "wanted": "sum(shoal_coordinator_wanted_workers)",
            },
            kind="stat",
        ),
        Panel(
            "Targets down",
            {"": 'count(up{component=~"coordinator|server|worker"} == 0) or vector(0)'},
            kind="stat",
            alarm=1,
        ),
        Panel("Jobs by state", {"{{state}}": "sum by (state) (shoal_coordinator_jobs)"}),
        Panel(
            "Pushes by outcome",
            {"{{outcome}}": _rate("shoal_server_pushes_total", "outcome")},
            "ops",
            "A shard each. Accepted ones make progress.",
        ),
    ],
    "How fast?": [
        Panel("Samples", {"samples": _rate("shoal_worker_samples_total")}, "short", "A second, of all workers."),
        Panel("Steps", {"steps": _rate("shoal_worker_steps_total")}, "short", "A second, of all workers."),
        Panel("Updates", {"updates": _rate("shoal_server_updates_total")}, "short", "A second, a shard each."),
        Panel(
            "Where a batch's time goes",
            {phase: _mean(phase) for phase in ("pull", "read", "compute", "push", "wait", "evaluate")},
            "s",
            "Seconds a batch, on average over the workers.",
        ),
        Panel("Pulls, without waiting", _quantiles("shoal_server_pull_seconds"), "s"),
        Panel("Waiting for the consistency mode", _quantiles("shoal_server_pull_wait_seconds"), "s"),
        Panel(
            "Pushes and commits",
            {"99 of 100, {{call}}": _quantile("shoal_server_push_seconds", 0.99, "call")},
            "s",
            "A push that goes out while gradients are computed lasts as long as they do.",
        ),
        Panel("Applying an update", _quantiles("shoal_server_apply_seconds"), "s"),
    ],
    "Who is the straggler?": [
        Panel(
            "A batch's own time, by worker",
            {"{{instance}}": "instance:shoal_batch_seconds:mean5m"},
            "s",
            "Reading and computing, over five minutes: the highest line is who the others wait for.",
        ),
        Panel(
            "Against the worker in the middle",
            {"{{instance}}": "instance:shoal_batch_slowness:ratio"},
            "short",
            "1: as fast as it. Compares batches of one job; with two jobs it says little.",
            alarm=1.5,
        ),
    ],
    "How stale?": [
        Panel("Versions between pull and push", _quantiles("shoal_server_staleness_versions"), "short", alarm=64),
        Panel("Pulls that wait", {"{{instance}}": "shoal_server_waiting_pulls"}, "short", "For the slowest worker."),
    ],
    "Is anything lost?": [
        Panel(
            "Members declared dead",
            {"{{role}}": "sum by (role) (increase(shoal_coordinator_members_lost_total[$__range]))"},
            kind="stat",
            alarm=1,
        ),
        Panel(
            "Jobs gone back",
            {"{{reason}}": "sum by (reason) (increase(shoal_coordinator_restarts_total[$__range]))"},
            kind="stat",
            text="Lost: their server was. Leaving: it said so first, and they were saved.",
            alarm=1,
        ),
        Panel(
            "Jobs failed",
            {"": _grown('shoal_coordinator_jobs_ended_total{state="failed"}')},
            kind="stat",
            alarm=1,
        ),
        Panel("Trainers died", {"": _grown("shoal_worker_trainer_crashes_total")}, kind="stat", alarm=1),
        Panel(
            "Pushes refused",
            {"{{reason}}": f"sum by (reason) (increase(shoal_server_rejected_pushes_total{_RATE}))"},
        ),
        Panel(
            "Pushes late, repeated or refused",
            {
                "late": _rate("shoal_worker_dropped_total"),
                "NaN or Inf": _rate("shoal_worker_rejected_total"),
                "repeated": _rate("shoal_server_duplicate_pushes_total"),
            },
            "ops",
        ),
        Panel(
            "Calls made again",
            {
                "workers to {{called}}": _rate("shoal_worker_retries_total", "called"),
                "coordinator to server": _rate("shoal_coordinator_retries_total"),
            },
            "ops",
        ),
        Panel(
            "Lines of logs dropped, and waiting",
            {
                "dropped": _rate("shoal_worker_log_lines_dropped_total"),
                "waiting": "sum(shoal_worker_log_lines_waiting)",
            },
        ),
    ],
    "Checkpoints": [
        Panel(
            "Jobs that cannot save", {"": "sum(shoal_coordinator_jobs_with_failed_checkpoint)"}, kind="stat", alarm=1
        ),
        Panel("Age of the oldest", {"": "max(shoal_coordinator_oldest_checkpoint_seconds)"}, "s", kind="stat"),
        Panel("Bytes of the newest", {"": "sum(shoal_coordinator_checkpoint_bytes)"}, "bytes", kind="stat"),
        Panel(
            "Age, in intervals",
            {"age": "max(shoal_coordinator_checkpoint_age_ratio)"},
            "short",
            "1: the next one is due.",
            alarm=3,
        ),
        Panel("From cut to whole", _quantiles("shoal_coordinator_checkpoint_seconds"), "s"),
        Panel(
            "By outcome",
            {"{{outcome}}": f"sum by (outcome) (increase(shoal_coordinator_checkpoints_total{_RATE}))"},
        ),
    ],
    "Where do the bytes go?": [
        Panel("Values to workers", {"{{transport}}": _rate("shoal_server_sent_bytes_total", "transport")}, "Bps"),
        Panel(
            "Gradients to servers", {"{{transport}}": _rate("shoal_server_received_bytes_total", "transport")}, "Bps"
        ),
        Panel("Lanes", {"{{transport}}": "sum by (transport) (shoal_server_lanes)"}, "short", "Workers' open sockets."),
        Panel(
            "Segments of shared memory",
            {"{{outcome}}": f"sum by (outcome) (increase(shoal_server_segments_total{_RATE}))"},
            "short",
            "Refused ones cost speed: see docs/how-to/compose.md on shared memory.",
        ),
    ],
    "Memory and queues": [
        Panel(
            "Servers' memory",
            {
                "{{instance}} in use": 'process_resident_memory_bytes{component="server"}',
                "{{instance}} limit": "shoal_server_memory_limit_bytes",
            },
            "bytes",
        ),
        Panel(
            "Shards, and memory kept for gradients",
            {
                "{{instance}} shards": "shoal_server_shard_bytes",
                "{{instance}} spare": "shoal_server_buffer_pool_free_bytes",
            },
            "bytes",
        ),
        Panel("GPUs' memory", {"{{instance}} {{kind}}": "shoal_worker_device_memory_bytes"}, "bytes"),
        Panel("Shards", {"{{instance}}": "shoal_server_shards"}),
        Panel("Pushes staged", {"{{instance}}": "shoal_server_staged_pushes"}),
        Panel(
            "Threads for calls by gRPC",
            {
                "{{instance}} {{pool}} busy": "shoal_server_busy_threads",
                "{{instance}} {{pool}} queued": "shoal_server_queued_calls",
            },
        ),
        Panel(
            "Calls to servers that are to be done",
            {"{{effect}}": "sum by (effect) (shoal_coordinator_pending_effects)"},
        ),
        Panel(
            "The coordinator's store",
            {
                **_quantiles("shoal_coordinator_store_write_seconds"),
            },
            "s",
        ),
        Panel("Decisions not written yet", {"decisions": "sum(shoal_coordinator_unwritten_changes)"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, in the classic JSON model of Grafana 10 and later."""
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
        "description": "Is it training, how fast, who is the straggler, how stale, is anything lost.",
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
    """The panels of a row in lines of the same height and width: first the figures, then the curves, two or three."""
    figures = [panel for panel in row if panel.kind == "stat"]
    curves = [panel for panel in row if panel.kind != "stat"]
    lines = [(4, _WIDTH // len(figures), figures)] if figures else []
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
    """The file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())

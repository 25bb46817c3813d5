"""Soak test of all roles: python benchmarks/cluster/soak.py [--minutes 30], prints a table and writes JSON.

Two workers train short jobs one at a time, in every mode, with checkpoints, evaluations and cancellations. After each
job, a session trains. Meanwhile the script reads what each role uses: its memory, open files and threads, and the
blocks that Python's allocator has handed out to it. A role is at rest between two jobs, so the smallest reading of a
minute is what the role uses at rest.

Some structures have a bounded size and fill only on demand: pools of threads, and the coordinator's list of members
that have left. A crowd of sessions fills them before the first minute. Each role also runs a thread that collects
garbage, because Python itself may keep old garbage for hours, and the blocks of garbage look like a leak.

After the first third of the run, the use at rest has limits: resident memory must grow by less than 8 MiB an hour, and
allocated blocks by less than 2 % an hour. The numbers of open files, threads and segments of shared memory must not
grow at all.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal._security import AccessRole, Credentials
from shoal._transport.segment import FOLDER_VARIABLE
from shoal.consistency import Consistency
from shoal_coordinator.cluster.dead_members import MAX_DEAD

_ROOT = Path(__file__).parents[2]
EXAMPLES = _ROOT / "examples"
RESULTS = _ROOT / "runs" / "soak" / "latest.json"
# Growth allowed, an hour: bytes of resident memory, and a share of the allocated blocks.
MEMORY_BYTES, BLOCKS_SHARE = 8 << 20, 0.02
_READ_EVERY_S = 1.0
# A short run has shorter minutes. Without a pause, its readings would use most of the processor time.
_LEAST_PAUSE_S = 0.2
# Sessions of the crowd that train at the same time. The load after it makes fewer calls at a time. With more, the
# coordinator could forget an ended job before its session drops it (--keep-finished-jobs).
_CROWD_AT_ONCE = 8
# Python runs this module at the start of each process that has its folder in PYTHONPATH. The reading of the metrics
# itself leaves garbage in cycles.
_SITE_MODULE = """
import gc
import os
import sys
import threading
import time

def collect():
    while True:
        gc.collect()
        time.sleep(0.5)

def start():
    threading.Thread(target=collect, name="collector", daemon=True).start()

if "shoal._cli.fork_server" in sys.orig_argv:  # it has no threads; the roles that it forks have
    os.register_at_fork(after_in_child=start)
else:
    start()
"""
_MODES: Sequence[Consistency] = (shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(2))


@dataclass
class Use:
    """What one role uses at rest, by minute.

    Attributes:
        resident: bytes of resident memory.
        blocks: memory blocks that Python's allocator has handed out.
        files: open files.
        threads: threads.
    """

    resident: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)


def smallest(into: dict[int, int], minute: int, reading: int) -> None:
    """Keeps the smallest reading of a minute."""
    into[minute] = min(reading, into.get(minute, reading))


class Readings:
    """Readings of the roles of a cluster, on a thread of their own. The end of the `with` block ends them.

    Args:
        cluster: the cluster, which runs.
        segments: folder of its shared memory.
        minute_s: seconds of a minute; a short run has shorter ones.
    """

    def __init__(self, cluster: shoal.LocalCluster, segments: Path, minute_s: float) -> None:
        self.roles = {process.name: Use() for process in cluster.processes}
        self.segments: dict[int, int] = {}
        self._processes = {
            process.name: (psutil.Process(process.pid), process.metrics) for process in cluster.processes
        }
        presented = Credentials.find().for_coordinator(cluster.address, AccessRole.ADMIN)
        self._authorization = dict(presented.metadata())
        self._folder, self._minute_s = segments, minute_s
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._done = self._thread.submit(self._read)

    def __enter__(self) -> "Readings":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._done.result()
        self._thread.shutdown()

    def _read(self) -> None:
        start = time.monotonic()
        while not self._stop.wait(max(_LEAST_PAUSE_S, _READ_EVERY_S * self._minute_s / 60)):
            minute = int((time.monotonic() - start) / self._minute_s)
            for name, (process, metrics) in self._processes.items():
                use = self.roles[name]
                smallest(use.resident, minute, process.memory_info().rss)
                smallest(use.files, minute, process.num_fds())
                smallest(use.threads, minute, process.num_threads())
                smallest(use.blocks, minute, allocated_blocks(metrics, self._authorization))
            smallest(self.segments, minute, len(list(self._folder.iterdir())))


def allocated_blocks(metrics: str, authorization: Mapping[str, str]) -> int:
    """Returns the number of allocated blocks from a role's metrics."""
    with urlopen(Request(f"http://{metrics}/metrics", headers=dict(authorization)), timeout=10) as reply:
        for family in text_string_to_metric_families(reply.read().decode()):
            if family.name == "python_allocated_blocks":
                return int(family.samples[0].value)
    raise LookupError(f"{metrics} has no metric python_allocated_blocks")


def train(client: shoal.Client, number: int, steps: int) -> None:
    """Runs one job. The jobs take the modes and the kinds of end in turn."""
    job = client.submit(
        shoal.Job(
            "digits:Digits",
            name=f"soak-{number}",
            workers=2,
            consistency=_MODES[number % len(_MODES)],
            max_steps=steps,
            checkpoints=shoal.CheckpointPolicy(every_steps=max(1, steps // 3)),
            evaluation=shoal.EvaluationPolicy(every_steps=max(1, steps // 2)),
        )
    )
    if number % 5 == 4:
        job.cancel()
    with suppress(shoal.errors.Cancelled):
        job.wait(timeout_s=120)
        client.pull(job.name)
    job.drop()


def crowd(client: shoal.Client, sessions: int, steps: int) -> None:
    """Holds many sessions, several at the same time. Each of them is a member that leaves."""
    policy = shoal.CheckpointPolicy(every_steps=max(1, steps // 3))
    with ThreadPoolExecutor(_CROWD_AT_ONCE) as threads:
        names = (f"soak-crowd-{number}" for number in range(sessions))
        held = [threads.submit(hold_session, client, name, steps, policy) for name in names]
    for each in held:
        each.result()


def hold_session(
    client: shoal.Client, name: str, steps: int, checkpoints: shoal.CheckpointPolicy | None = None
) -> None:
    """Pushes through a session of this process.

    Args:
        client: client of the cluster.
        name: name of the session's job, which is dropped at the end.
        steps: number of pushes.
        checkpoints: when to take checkpoints. None means never.
    """
    variables = {f"w{index}": shoal.Variable((64, 64)) for index in range(8)}
    with client.session(
        name, variables=variables, consistency=shoal.Asynchronous(), checkpoints=checkpoints
    ) as session:
        for _ in range(steps):
            session.push({key: np.ones_like(value) for key, value in session.pull().items()})
    client.job(name).wait(timeout_s=60)
    client.job(name).drop()


def growth_an_hour(by_minute: Mapping[int, int], first: int, minute_s: float) -> float:
    """The slope of a least-squares line through the readings from minute `first` on, an hour."""
    points = [(minute * minute_s / 3600, reading) for minute, reading in by_minute.items() if minute >= first]
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def grown(by_minute: Mapping[int, int], first: int) -> int:
    """By how much the smallest reading of the last third exceeds that of the first third, from minute `first` on."""
    readings = [reading for minute, reading in sorted(by_minute.items()) if minute >= first]
    third = max(1, len(readings) // 3)
    return min(readings[-third:]) - min(readings[:third])


@dataclass(frozen=True)
class Row:
    """How one quantity of a role developed.

    Attributes:
        role: the role's name; "all" for what the roles share.
        what: the quantity.
        growth: its growth.
        allowed: the growth allowed.
        by_minute: the use at rest in each minute.
    """

    role: str
    what: str
    growth: float
    allowed: float
    by_minute: list[int]

    @property
    def passed(self) -> bool:
        """Whether the quantity grew by no more than is allowed."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "GREW"
        growth = f"{self.growth:14,.0f} of {self.allowed:,.0f}"
        return f"{verdict:5}{self.role:13}{self.what:25}{growth}, at the end {self.by_minute[-1]:,}"


def rows(readings: Readings, first: int, minute_s: float) -> Iterator[Row]:
    """One row for each role and quantity, from minute `first` on."""
    for name, use in readings.roles.items():
        hourly = {
            "resident bytes an hour": (use.resident, MEMORY_BYTES),
            "allocated blocks an hour": (use.blocks, BLOCKS_SHARE * statistics.median(use.blocks.values())),
        }
        for what, (by_minute, allowed) in hourly.items():
            growth = growth_an_hour(by_minute, first, minute_s)
            yield Row(name, what, growth, allowed, list(by_minute.values()))
        for what, by_minute in {"open files": use.files, "threads": use.threads}.items():
            yield Row(name, what, grown(by_minute, first), 0, list(by_minute.values()))
    segments = readings.segments
    yield Row("all", "segments", grown(segments, first), 0, list(segments.values()))


def soak(minutes: int, minute_s: float, steps: int, crowded: int = MAX_DEAD) -> tuple[int, list[Row]]:
    """Runs jobs and sessions.

    Args:
        minutes: number of minutes.
        minute_s: seconds of a minute.
        steps: steps of each job and of each session.
        crowded: sessions before the first minute; by default, as many members that have left as the coordinator keeps.

    Returns:
        The number of jobs, which is also the number of sessions, and the rows.
    """
    folder = Path(tempfile.mkdtemp(prefix="shoal-soak-"))
    segments = Path(tempfile.mkdtemp(prefix="shoal-soak-", dir="/dev/shm"))
    site = Path(tempfile.mkdtemp(prefix="shoal-soak-"))
    (site / "sitecustomize.py").write_text(_SITE_MODULE)
    env = {FOLDER_VARIABLE: str(segments), "PYTHONPATH": str(site)}
    options: dict[str, Any] = {"path": [EXAMPLES], "checkpoints": folder, "env": env}
    try:
        with shoal.LocalCluster(2, 2, **options) as cluster, cluster.client() as client:
            crowd(client, crowded, steps)
            with Readings(cluster, segments, minute_s) as readings:
                end = time.monotonic() + minutes * minute_s
                for number in itertools.count():
                    train(client, number, steps)
                    hold_session(client, f"soak-session-{number}", steps)
                    if time.monotonic() >= end:
                        break
            return number + 1, list(rows(readings, minutes // 3, minute_s))
    finally:
        for each in (folder, segments, site):
            shutil.rmtree(each)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--short", action="store_true", help="minutes of 1 s, to see that it runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    minutes, minute_s, steps = (3, 1.0, 6) if options.short else (options.minutes, 60.0, 100)
    jobs, table = soak(minutes, minute_s, steps, _CROWD_AT_ONCE if options.short else MAX_DEAD)
    result = {
        "minutes": minutes,
        "minute_s": minute_s,
        "jobs": jobs,
        "sessions": jobs,
        "rows": [asdict(row) | {"passed": row.passed} for row in table],
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{jobs} jobs and as many sessions in {minutes} minutes of {minute_s:.0f} s")
    for row in table:
        print(row)
    if not options.short and not all(row.passed for row in table):
        sys.exit(1)


if __name__ == "__main__":
    main()

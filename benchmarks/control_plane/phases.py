"""Measurements of a real coordinator with simulated members: entry, training, a death, the end of a job.

Each measurement is a phase. `scale` and `admission` choose which phases they run. A phase needs the phases before it.
"""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from simulated_members import Members, ask, cpu_s, members, ready, wait_for

import shoal
from shoal.status import JobState, Role

JOB = "scale"
WATCHERS = 60
_WATCH_ROUNDS = 3
# Enough for any run: the simulated workers need minutes for one epoch.
_EPOCHS = 1_000
_POLL_S = 0.25


@dataclass(frozen=True)
class Scale:
    """What is run.

    Attributes:
        workers, servers: numbers of simulated members.
        processes: over which the workers are divided, and over which the servers are.
        heartbeat_timeout_s: the heartbeat timeout, in seconds.
        interval_s: the heartbeat interval of a small cluster, in seconds.
        measured_s: for how long the processor time is measured, in seconds.
        store: the coordinator's store; empty: a new file.
    """

    workers: int = 1_000
    servers: int = 100
    processes: int = 2
    heartbeat_timeout_s: float = 10.0
    interval_s: float = 0.5
    measured_s: float = 30.0
    store: str = ""


@dataclass
class Simulation:
    """A coordinator with simulated members.

    Attributes:
        scale: what is run.
        client: a client of the cluster.
        coordinator: process id of the coordinator.
        servers, workers: the processes of the members.
        facts: what registration took.
        job: handle of the job, after `admit`.
    """

    scale: Scale
    client: shoal.Client
    coordinator: int
    servers: list[Members]
    workers: list[Members]
    facts: dict[str, Any]
    job: shoal.JobHandle | None = None

    @property
    def interval_s(self) -> float:
        """The heartbeat interval that the workers were told."""
        return float(ask(self.workers)["interval_s"])


@contextmanager
def simulated(scale: Scale) -> Iterator[Simulation]:
    """Starts a coordinator, and registers the members."""
    flags = [
        "--heartbeat-timeout",
        str(scale.heartbeat_timeout_s),
        "--heartbeat-interval",
        str(scale.interval_s),
    ]
    with (
        shoal.LocalCluster(
            servers=0, workers=0, page_listen="", store=scale.store, flags={"coordinator": flags}
        ) as cluster,
        cluster.client() as client,
    ):
        coordinator = cluster.process("coordinator").pid
        alone = _cores(coordinator, min(5.0, scale.measured_s))
        address, began = cluster.address, time.monotonic()
        with (
            members("servers", address, scale.servers, scale.workers, processes=scale.processes) as servers,
            members("workers", address, scale.workers, scale.servers, processes=scale.processes) as workers,
        ):
            ready([*servers, *workers])
            facts = {
                "workers": scale.workers,
                "servers": scale.servers,
                "heartbeat_timeout_s": scale.heartbeat_timeout_s,
                "registered_s": round(time.monotonic() - began, 2),
                "cores_without_members": round(alone, 4),
            }
            yield Simulation(scale, client, coordinator, servers, workers, facts)


def admit(run: Simulation) -> dict[str, Any]:
    """Submits a job of all workers on all servers, and measures until all may train.

    Returns:
        Seconds from Submit until the last server has admitted the last worker, and until Join has told the last worker
        that it may begin; the coordinator's processor time; calls to each server.
    """
    scale = run.scale
    spec = shoal.Job(
        "simulated:job",
        name=JOB,
        workers=scale.workers,
        shards=scale.servers,
        consistency=shoal.Asynchronous(),
        epochs=_EPOCHS,
    )
    used, began = cpu_s(run.coordinator), time.monotonic()
    run.job = run.client.submit(spec)
    wait_for(lambda: bool(ask(run.workers)["joined"] == scale.workers), "all workers have joined", _POLL_S)
    wait_for(lambda: bool(ask(run.servers)["complete"] == scale.servers), "all servers have admitted all", _POLL_S)
    used = cpu_s(run.coordinator) - used
    assert run.job.status().state is JobState.RUNNING
    servers = ask(run.servers)
    return {
        "admitted_s": round(servers["admitted_at"] - began, 2),
        "joined_s": round(ask(run.workers)["joined_at"] - began, 2),
        "admission_cpu_s": round(used, 2),
        "calls_a_server": round(servers["calls"] / scale.servers, 1),
    }


def train(run: Simulation) -> dict[str, Any]:
    """Measures the coordinator while all workers report."""
    time.sleep(2 * run.interval_s)  # until all have heard the interval, and calls are spread
    leases, load = ask(run.workers)["leases"], _load(run, run.scale.measured_s)
    leases = ask(run.workers)["leases"] - leases
    return {
        "interval_s": round(run.interval_s, 3),
        "calls_per_s": round(load.calls / load.seconds, 1),
        "heartbeats_per_s": round(load.heartbeats / load.seconds, 1),
        "leases_per_s": round(leases / load.seconds, 1),
        "coordinator_cores": round(load.cores, 3),
        "us_per_call": round(load.us_per_call),
        "steps_reported": ask(run.workers)["steps"],
    }


def watch(run: Simulation) -> dict[str, Any]:
    """Measures by turns what a call costs the coordinator without watchers, and while clients watch another job.

    Returns:
        The number of watchers, and the ratio of the two costs, the median of the rounds.
    """
    ratios = []
    for number in range(_WATCH_ROUNDS):
        without = _load(run, run.scale.measured_s / 3).us_per_call
        with _watched(run, f"watched-{number}"):
            ratios.append(_load(run, run.scale.measured_s / 3).us_per_call / without)
    return {"watchers": WATCHERS, "watched_ratio": round(statistics.median(ratios), 3)}


def remove(run: Simulation) -> dict[str, Any]:
    """Silences a worker of each process, and measures until the last server has released it.

    Returns:
        The longest time from the last call of a silent worker, until all servers had released it, in seconds.
    """
    silent = ask(run.workers, "silence")["silent"]
    wait_for(
        lambda: silent.keys() <= ask(run.servers)["released_by_all"].keys(), "servers have released a worker", _POLL_S
    )
    released = ask(run.servers)["released_by_all"]
    alive = len(run.client.status().alive(Role.WORKER))
    lost = ask(run.workers)["lost"] + run.scale.workers - len(silent) - alive
    return {
        "released_after_s": round(max(released[worker] - at for worker, at in silent.items()), 2),
        "declared_lost": lost,
    }


def cancel(run: Simulation) -> dict[str, Any]:
    """Cancels the job, and measures until the last worker knows."""
    assert run.job
    began = time.monotonic()
    run.job.cancel()

    def all_know() -> bool:
        found = ask(run.workers)
        return bool(found["learned"] == found["workers"])

    wait_for(all_know, "all workers have learned of the end", _POLL_S)
    return {"cancel_s": round(ask(run.workers)["learned_at"] - began, 2)}


def rest(run: Simulation) -> dict[str, Any]:
    """Measures the coordinator while members without a job send heartbeats."""
    time.sleep(2 * run.interval_s)
    load = _load(run, run.scale.measured_s / 2)
    load = replace(load, cores=max(0.0, load.cores - run.facts["cores_without_members"]))
    return {"us_per_heartbeat": round(load.us_per_call)}


@contextmanager
def _watched(run: Simulation, name: str) -> Iterator[None]:
    """Lets many clients watch a job that waits for a worker."""
    job = run.client.submit(shoal.Job("simulated:job", name=name, workers=1))
    with ExitStack() as clients, ThreadPoolExecutor(WATCHERS) as pool:
        for _ in range(WATCHERS):
            watcher = clients.enter_context(shoal.connect(run.client.address)).job(name)
            pool.submit(lambda watcher=watcher: list(watcher.events()))
        yield
        job.cancel()


@dataclass(frozen=True)
class _CallLoad:
    """The load of the coordinator during some time.

    Attributes:
        cores: cores that it used.
        seconds: the time.
        heartbeats, reports: numbers of calls.
    """

    cores: float
    seconds: float
    heartbeats: int
    reports: int

    @property
    def calls(self) -> int:
        return self.heartbeats + self.reports

    @property
    def us_per_call(self) -> float:
        """Processor time of a call, in microseconds."""
        return 1e6 * self.cores * self.seconds / max(1, self.calls)


def _load(run: Simulation, seconds: float) -> _CallLoad:
    """Measures the coordinator for some time."""
    workers, servers = ask(run.workers), ask(run.servers)
    heartbeats, reports = workers["heartbeats"] + servers["heartbeats"], workers["reports"]
    cores, taken = _cores_timed(run.coordinator, seconds)
    workers, servers = ask(run.workers), ask(run.servers)
    heartbeats = workers["heartbeats"] + servers["heartbeats"] - heartbeats
    return _CallLoad(cores, taken, heartbeats, workers["reports"] - reports)


def _cores(pid: int, seconds: float) -> float:
    return _cores_timed(pid, seconds)[0]


def _cores_timed(pid: int, seconds: float) -> tuple[float, float]:
    """Returns the cores that a process uses for some time, and the exact seconds."""
    used, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    taken = time.monotonic() - began
    return (cpu_s(pid) - used) / taken, taken

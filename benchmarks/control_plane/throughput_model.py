"""A model of the throughput of a number of workers, and of the resource that bounds it (no clock, no I/O).

The model divides a *round*, in which each worker takes one step, over the resources that it needs. For each resource it
computes how many seconds a round would take if all other resources cost no time:

- the worker's computation;
- the worker's link, and the worker's processor, for the bytes that one worker pulls and pushes;
- the servers' links, for the bytes of all workers;
- a server's interpreter: it handles one call after the other, and each worker makes a pull and a push to each server;
- the servers' processors, for the calls and for the bytes.

If calls overlap with computation, as in asynchronous mode, the resource that needs the most seconds gives the length of
the round. Otherwise a round is a computation, then a pull, then a push. The pull and the push each take as long as they
need on their slowest resource.

The coordinator bounds the number of workers. If it cannot handle the messages of all members, only the workers that it
can hear take part in the round, on the same servers. The coordinator is then the bottleneck, unless these workers are
still so many that the servers bound the round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from shoal_coordinator.cluster.heartbeat_interval import heartbeat_interval_s

WORKERS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
# A report is sent after this part of the heartbeat interval, on average (`HeartbeatPace`).
REPORT_PART = 0.84
# The interval of a small cluster, in seconds.
SHORTEST_INTERVAL_S = 0.5
_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Cost:
    """Processor seconds of one call: some for the call, and some for each byte."""

    call_s: float
    byte_s: float

    def of(self, size: float) -> float:
        """Returns the processor seconds of a call with so many bytes."""
        return self.call_s + size * self.byte_s


@dataclass(frozen=True)
class Constants:
    """Measured constants.

    Attributes:
        server_pull, server_push: a server's costs of a call, if all of a job is on one server.
        staged_pull_s, staged_push_s: processor seconds of a server for the calls of a pull, and of a push, if there are
            several servers.
        synchronous_byte_s: processor seconds of a server for a byte of a synchronous push.
        worker_byte_s: processor seconds of a worker for a byte that it pulls or pushes.
        report_s: processor seconds of the coordinator for a report, which is a heartbeat, too.
    """

    server_pull: Cost
    server_push: Cost
    staged_pull_s: float
    staged_push_s: float
    synchronous_byte_s: float
    worker_byte_s: float
    report_s: float

    @classmethod
    def measured(cls, result: Mapping[str, Any]) -> "Constants":
        """Returns the constants in a result of `scale`."""
        cases = result["data_plane"]
        small, large = cases["small_asynchronous"], cases["large_asynchronous"]
        two, in_turn = cases["small_two_servers"], cases["large_synchronous"]
        pull, push = (_line(small, large, f"server_{call}_s") for call in ("pull", "push"))
        # A push is measured as the difference between a step and a pull, so the two add up to a step.
        size, staged_pull_s = two["bytes"] / two["servers"], two["server_pull_s"]
        return cls(
            server_pull=pull,
            server_push=push,
            staged_pull_s=max(pull.call_s, staged_pull_s - size * pull.byte_s),
            staged_push_s=max(push.call_s, two["server_step_s"] - staged_pull_s - size * push.byte_s),
            synchronous_byte_s=max(push.byte_s, in_turn["server_step_s"] / in_turn["bytes"] - pull.byte_s),
            worker_byte_s=_line(small, large, "worker_step_s").byte_s / 2,
            report_s=result["control_plane"]["us_per_call"] / 1e6,
        )


def _line(small: Mapping[str, float], large: Mapping[str, float], key: str) -> Cost:
    """Returns the cost that gives both measurements."""
    byte_s = (large[key] - small[key]) / (large["bytes"] - small["bytes"])
    return Cost(max(0.0, small[key] - byte_s * small["bytes"]), byte_s)


@dataclass(frozen=True)
class Case:
    """A job on a cluster.

    Attributes:
        name: its heading.
        model_bytes: bytes that a worker pulls, and pushes, in a step.
        compute_s: seconds of computation in a step.
        batch: samples in a step of one worker.
        synchronous: whether the workers wait for each other, and calls do not overlap with computation.
        workers_a_server: workers for each server; 0: one server for all.
        server_cores: cores of a server.
        heartbeat_timeout_s: the heartbeat timeout.
    """

    name: str
    model_bytes: float
    compute_s: float
    batch: int
    synchronous: bool
    workers_a_server: int
    server_cores: int = 8
    heartbeat_timeout_s: float = 30.0

    def servers(self, workers: int) -> int:
        """Returns the number of servers beside so many workers."""
        return ceil(workers / self.workers_a_server) if self.workers_a_server else 1


CASES = (
    Case("Dense, 100 MB, synchronous", 100e6, 0.2, 32, synchronous=True, workers_a_server=10),
    Case("Small, 170 KB, asynchronous", 170e3, 0.02, 32, synchronous=False, workers_a_server=0),
    Case("Embedding-like, 2 GB, asynchronous", 2e9, 2.0, 4_096, synchronous=False, workers_a_server=4),
)
LINKS_GBIT = (10.0, 25.0)


@dataclass(frozen=True)
class Estimate:
    """What the model says of a case with a number of workers.

    Attributes:
        workers, servers: their numbers.
        steps_per_s: steps of all workers a second.
        samples_per_s: samples a second.
        bytes_per_s: bytes that servers send and receive a second.
        bottleneck: the resource that bounds it.
        share: steps a second as a part of what computation alone allows.
    """

    workers: int
    servers: int
    steps_per_s: float
    samples_per_s: float
    bytes_per_s: float
    bottleneck: str
    share: float


COMPUTE, LINK, PROCESSOR, COORDINATOR = "worker compute", "worker link", "worker processor", "coordinator"
# With any other bottleneck, the servers bound the round, and more workers would not make the job faster.
_OF_WORKERS = {COMPUTE, LINK, PROCESSOR}


def estimate(case: Case, workers: int, link_gbit: float, constants: Constants) -> Estimate:
    """Estimates the throughput of a case.

    Args:
        case: the job.
        workers: number of workers.
        link_gbit: speed of each host's link in each direction, in Gbit/s.
        constants: what calls and bytes cost.

    Returns:
        The estimate.
    """
    servers = case.servers(workers)
    busy = coordinator_cores(workers + servers, case.heartbeat_timeout_s, constants.report_s)
    active = workers if busy <= 1.0 else max(1, int(workers / busy))
    round_s, bottleneck = _round(case, *_calls(case, active, servers, link_gbit * _GBIT, constants))
    if active < workers and bottleneck in _OF_WORKERS:
        bottleneck = COORDINATOR
    steps = active / round_s
    return Estimate(
        workers,
        servers,
        steps,
        steps * case.batch,
        2 * steps * case.model_bytes,
        bottleneck,
        steps / (workers / case.compute_s),
    )


def _round(case: Case, pull: Mapping[str, float], push: Mapping[str, float]) -> tuple[float, str]:
    """Returns the seconds of a round, and the resource that it waits for longest.

    Args:
        case: the job.
        pull, push: seconds of each resource for the pulls of a round, and for its pushes.
    """
    if case.synchronous:
        parts = {COMPUTE: case.compute_s}
        for call in (pull, push):
            slowest = max(call, key=lambda it: call[it])
            parts[slowest] = parts.get(slowest, 0.0) + call[slowest]
        round_s = sum(parts.values())
    else:
        # A link carries both directions at a time; processors and the interpreter do one or the other.
        parts = {COMPUTE: case.compute_s} | {
            name: max(pull[name], push[name]) if "link" in name else pull[name] + push[name] for name in pull
        }
        round_s = max(parts.values())
    return round_s, max(parts, key=lambda it: parts[it])


def coordinator_cores(members: int, heartbeat_timeout_s: float, report_s: float) -> float:
    """Returns the cores of a coordinator that hears this many members; it has one at most.

    Args:
        members: number of members.
        heartbeat_timeout_s: the heartbeat timeout, in seconds.
        report_s: processor seconds of a report.
    """
    interval_s = heartbeat_interval_s(members, heartbeat_timeout_s, SHORTEST_INTERVAL_S)
    return members / (REPORT_PART * interval_s) * report_s


def _calls(
    case: Case, workers: int, servers: int, link: float, constants: Constants
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of each resource for the pulls of a round, and for its pushes.

    Args:
        case: the job.
        workers, servers: their numbers.
        link: bytes a second of a link, in each direction.
        constants: what calls and bytes cost.
    """
    pull, push = constants.server_pull, constants.server_push
    pull_s, push_s = (constants.staged_pull_s, constants.staged_push_s) if servers > 1 else (pull.call_s, push.call_s)
    push_byte_s = constants.synchronous_byte_s if case.synchronous else push.byte_s

    def resources(call_s: float, byte_s: float) -> dict[str, float]:
        return {
            LINK: case.model_bytes / link,
            PROCESSOR: case.model_bytes * constants.worker_byte_s,
            "server links": workers * case.model_bytes / (servers * link),
            "server interpreter": workers * call_s,
            "server processors": workers * (call_s + case.model_bytes / servers * byte_s) / case.server_cores,
        }

    return resources(pull_s, pull.byte_s), resources(push_s, push_byte_s)


def table(case: Case, constants: Constants, links: Sequence[float] = LINKS_GBIT) -> list[list[Estimate]]:
    """Returns a row of estimates, one for each link, for each number of workers."""
    return [[estimate(case, workers, link, constants) for link in links] for workers in WORKERS]

"""Plan of one run: the members, the job, the weather and the faults. A seed gives one plan."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from shoal.consistency import Asynchronous, BoundedStaleness, Consistency, Synchronous
from simulation.network import Weather

# Seconds of simulated time during which faults happen, and after which a run has failed.
FAULTS_S, LIMIT_S = 14.0, 400.0


class FaultKind(Enum):
    """What a fault does to its target. `seconds` is how long it lasts, or until a process starts again."""

    CRASH = "crash"  # the process is killed, and another one starts
    CRASH_TRAINER = "crash_trainer"  # the trainer of a worker is killed
    STOP = "stop"  # the process is stopped, and goes on
    PARTITION = "partition"  # the machine cannot reach the others, in either direction
    LINK = "link"  # two machines cannot reach each other
    STORAGE = "storage"  # the checkpoint storage is away
    CHECKPOINT = "checkpoint"  # no fault: a user asks for a checkpoint
    JOIN = "join"  # no fault: another server starts
    DRAIN = "drain"  # no fault: a user orders that a server drains and ends for good
    TERMINATE = "terminate"  # a server gets SIGTERM: it drains, ends, and another process starts


_WORKER_ENDS = FaultKind.CRASH, FaultKind.CRASH_TRAINER
# What is drawn for all runs.
_COMMON = tuple(kind for kind in FaultKind if kind.value not in ("join", "drain", "terminate"))


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds from the beginning.
        kind: what happens.
        target: name of the machine.
        seconds: how long it lasts.
        other: the other end of a link.
        offset_s: how far the clock of a restarted machine is off.
        grace_s: of SIGTERM, the grace period.
    """

    at: float
    kind: FaultKind
    target: str
    seconds: float
    other: str = ""
    offset_s: float = 0.0
    grace_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What happens in a run, besides the order that the seed draws.

    Attributes:
        seed: seed of the run.
        servers, workers: number of machines. In a run with moves, some of the servers join later.
        wanted: number of workers that the job wants.
        consistency: the job's mode.
        samples, epochs, range_size, batch: the job's data.
        checkpoint_s: seconds between checkpoints.
        norms: whether servers exchange norms.
        overlap: whether workers pull the next values before they push.
        weather: how bad the network is until the faults end.
        replicas: copies of each shard.
        moves: whether the shards are large enough to move, and the job goes on until all is in its place.
        step_s: mean seconds of a worker's step.
        copy_s: seconds that the values of a copy take at most.
        zones: number of zones of the servers, in turn; 0 means that each server is alone in its zone.
        paces: seconds of each machine's clock in a true second; by index, servers first.
        faults: in order of time.
    """

    seed: int
    servers: int
    workers: int
    wanted: int
    consistency: Consistency
    samples: int
    epochs: int
    range_size: int
    batch: int
    checkpoint_s: float
    norms: bool
    overlap: bool
    weather: Weather
    paces: tuple[float, ...]
    faults: tuple[Fault, ...]
    replicas: int = 1
    moves: bool = False
    step_s: float = 0.07
    copy_s: float = 0.1
    zones: int = 0

    @property
    def calm_at(self) -> float:
        """When all faults have ended."""
        return max((fault.at + fault.seconds for fault in self.faults), default=0.0)

    @property
    def names(self) -> list[str]:
        """The machines: servers, workers, and the coordinator."""
        return [*server_names(self.servers), *worker_names(self.workers), COORDINATOR]

    def zone_of(self, server: str) -> str:
        """Returns the zone that a server states."""
        return f"z{server_names(self.servers).index(server) % self.zones}" if self.zones else ""

    def described(self) -> str:
        """Returns the plan in a few lines."""
        lines = [
            f"seed {self.seed}: {self.servers} servers, {self.workers} workers ({self.wanted} wanted), "
            f"{self.consistency}, {self.epochs} x {self.samples} samples in ranges of {self.range_size} and batches of "
            f"{self.batch}, checkpoints every {self.checkpoint_s:g} s, norms={self.norms}, overlap={self.overlap}, "
            f"replicas={self.replicas}, moves={self.moves}, zones={self.zones}",
            f"  {self.weather}",
        ]
        lines += [
            f"  {fault.at:7.3f} s  {fault.kind.value} {fault.target}"
            + (f" - {fault.other}" if fault.other else "")
            + f" for {fault.seconds:.3f} s"
            + (f", clock {fault.offset_s:+.0f} s" if fault.offset_s else "")
            for fault in self.faults
        ]
        return "\n".join(lines)


COORDINATOR = "coordinator"


def server_names(count: int) -> list[str]:
    """Returns the names of the servers."""
    return [f"s{index}" for index in range(count)]


def worker_names(count: int) -> list[str]:
    """Returns the names of the workers."""
    return [f"w{index}" for index in range(count)]


def plan_of(seed: int) -> Plan:
    """Returns the plan of a seed."""
    draw = random.Random(f"plan {seed}")
    servers, workers = draw.choice((1, 2, 2, 2, 3)), draw.choice((1, 2, 2, 3, 3))
    wanted = max(1, workers - draw.choice((0, 0, 1)))
    batch = 2
    modes: list[Consistency] = [
        Synchronous(),
        Synchronous(),
        Asynchronous(),
        Asynchronous(),
        BoundedStaleness(draw.choice((0, 1, 2))),
        Synchronous(backup_workers=1) if wanted > 1 else Synchronous(),
    ]
    mode = draw.choice(modes)
    plan = Plan(
        seed,
        servers,
        workers,
        wanted,
        mode,
        samples=draw.choice((24, 32, 45)),
        epochs=draw.choice((1, 1, 2)),
        range_size=batch * draw.choice((1, 2, 4)),
        batch=batch,
        checkpoint_s=draw.choice((1.0, 2.0, 3.0)),
        norms=isinstance(mode, Synchronous) and servers > 1 and draw.random() < 0.3,
        overlap=mode.overlaps and draw.random() < 0.5,
        weather=_weather(draw),
        paces=tuple(draw.uniform(0.95, 1.05) for _ in range(servers + workers + 1)),
        faults=(),
    )
    faults = _faults(draw, plan)
    race = draw.choice((None, None, _fencing_race, _late_restart))
    if race:
        more, weather = race(draw, plan)
        plan, faults = replace(plan, weather=weather), faults[:2] + more
    return moving(_replicated(replace(plan, faults=in_order(faults))))


def _replicated(plan: Plan) -> Plan:
    """Returns the plan, sometimes with two copies of each shard."""
    draw = random.Random(f"replicas {plan.seed}")
    # Servers that exchange norms have no replicas.
    if plan.servers < 2 or plan.norms or draw.random() < 0.5:
        return plan
    faults = plan.faults + (_failover_race(draw, plan) if draw.random() < 0.5 else ())
    return replace(plan, replicas=2, faults=in_order(faults))


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Returns faults in the order of their times."""
    return tuple(sorted(faults, key=lambda fault: fault.at))


def moving(plan: Plan) -> Plan:
    """Returns the plan, for a third of the seeds with servers that come and go, and shards that move."""
    draw = random.Random(f"moves {plan.seed}")
    # The servers of a job that exchange norms do not move.
    if plan.norms or draw.random() < 0.6:
        return plan
    joins, drains = draw.choice(((1, 0), (1, 0), (2, 0), (0, 1), (1, 1), (1, 1), (1, 2)))
    replicated = draw.random() < 0.5
    first = max(plan.servers, 3) if replicated and draw.random() < 0.8 else plan.servers  # a third copy needs a place
    servers = first + joins
    names = server_names(servers)
    comings = [Fault(draw.uniform(1.0, 5.0), FaultKind.JOIN, name, 0.0) for name in names[first:]]
    goings = [_going(draw, names) for _ in range(drains)]
    kept = [replace(it, at=0.7 * it.at, seconds=min(it.seconds, 4.0)) for it in plan.faults]
    added = [*comings, *goings]
    drained = sum(it.kind is FaultKind.DRAIN for it in goings)
    replicas = 2 if replicated and servers - drained > 1 else 1
    if replicas > 1 and servers > 2 and draw.random() < 0.4:
        more, late = _chain_race(draw, draw.choice(added), names)
        added += more
        plan = replace(plan, weather=replace(plan.weather, late=late, late_s=3.0) if late else plan.weather)
    elif draw.random() < 0.7:
        added += _moving_race(draw, draw.choice(added), names, worker_names(plan.workers))
    split = plan.servers
    zones = 2 if replicas > 1 and servers > 2 and random.Random(f"zones {plan.seed}").random() < 0.5 else 0
    return replace(
        plan,
        servers=servers,
        replicas=replicas,
        moves=True,
        step_s=0.2,
        copy_s=draw.choice((0.1, 0.5, 2.0)),
        zones=zones,
        samples=draw.choice((32, 45)),
        paces=(*plan.paces[:split], *(draw.uniform(0.95, 1.05) for _ in names[split:]), *plan.paces[split:]),
        faults=in_order([*kept, *added]),
    )


def _going(draw: random.Random, names: list[str]) -> Fault:
    at, name = draw.uniform(2.0, 7.0), draw.choice(names)
    if draw.random() < 0.5:
        return Fault(at, FaultKind.DRAIN, name, 0.0)
    return Fault(at, FaultKind.TERMINATE, name, draw.uniform(0.5, 3.0), grace_s=draw.choice((4.0, 20.0, 60.0)))


def _weather(draw: random.Random) -> Weather:
    if draw.random() < 0.2:
        return Weather()
    return Weather(
        delay_s=draw.choice((0.002, 0.01, 0.05)),
        lost=draw.choice((0.0, 0.01, 0.03)),
        lost_replies=draw.choice((0.0, 0.02, 0.05)),
        doubled=draw.choice((0.0, 0.02, 0.1)),
        late=draw.choice((0.0, 0.02, 0.05)),
        late_s=draw.choice((0.3, 2.0, 8.0)),
    )


def _faults(draw: random.Random, plan: Plan) -> tuple[Fault, ...]:
    servers, workers = server_names(plan.servers), worker_names(plan.workers)
    found = []
    for _ in range(draw.choice((0, 1, 2, 3, 4))):
        kind = draw.choice([*_COMMON, FaultKind.CRASH, FaultKind.CRASH])
        target = draw.choice([*servers, *workers, COORDINATOR])
        if kind is FaultKind.CRASH_TRAINER:
            target = draw.choice(workers)
        seconds = draw.choice((0.05, 0.5, 2.0, 4.0, 8.0)) * draw.uniform(0.5, 1.0)
        other = draw.choice([name for name in plan.names if name != target]) if kind is FaultKind.LINK else ""
        offset_s = draw.choice((0.0, 0.0, -300.0, 300.0)) if kind is FaultKind.CRASH else 0.0
        found.append(Fault(draw.uniform(0.5, FAULTS_S), kind, target, seconds, other, offset_s))
    return tuple(found)


# Faults that meet seldom by chance, in the order that is the most difficult for some protection.


def _fencing_race(draw: random.Random, plan: Plan) -> tuple[tuple[Fault, ...], Weather]:
    """A worker is declared lost, but reaches the servers. The coordinator cannot fence it on one of them."""
    worker, server = draw.choice(worker_names(plan.workers)), draw.choice(server_names(plan.servers))
    at = draw.uniform(0.5, 2.0)
    lost_at = at + draw.uniform(2.0, 4.5)
    cuts = (
        Fault(at, FaultKind.LINK, worker, draw.uniform(4.5, 8.0), COORDINATOR),
        Fault(lost_at, FaultKind.LINK, server, draw.uniform(0.5, 2.5), COORDINATOR),
    )
    return cuts, plan.weather


def _late_restart(draw: random.Random, plan: Plan) -> tuple[tuple[Fault, ...], Weather]:
    """A job restarts while calls of its earlier generation are on their way."""
    server = draw.choice(server_names(plan.servers))
    crash = Fault(draw.uniform(1.0, 4.0), FaultKind.CRASH, server, draw.uniform(0.05, 2.0))
    late, late_s, doubled = draw.choice((0.03, 0.1)), draw.choice((6.0, 9.0)), draw.choice((0.1, 0.3))
    return (crash,), replace(plan.weather, late=late, late_s=late_s, doubled=doubled)


def _moving_race(draw: random.Random, change: Fault, names: list[str], workers: list[str]) -> list[Fault]:
    """A process dies, or is cut off, while shards move because of a change of the servers."""
    wait_s = 3.0 if change.kind is FaultKind.JOIN else 0.0  # the coordinator waits for other changes
    at = change.at + wait_s + draw.uniform(0.0, 2.0)
    if draw.random() < 0.3:
        # A worker does not reach a server when a lock group is split, and then dies: its push is staged there.
        worker, server = draw.choice(workers), draw.choice(names)
        link = Fault(at - draw.uniform(0.0, 3.0), FaultKind.LINK, worker, draw.uniform(2.0, 6.0), server)
        return [link, Fault(at + draw.uniform(0.5, 3.0), draw.choice(_WORKER_ENDS), worker, 2.0)]
    target = draw.choice([change.target, *names, COORDINATOR])
    kind = draw.choice((FaultKind.CRASH, FaultKind.CRASH, FaultKind.PARTITION, FaultKind.STOP, FaultKind.LINK))
    other = draw.choice([name for name in (*names, COORDINATOR) if name != target]) if kind is FaultKind.LINK else ""
    return [Fault(at, kind, target, draw.uniform(0.05, 5.0), other)]


def _chain_race(draw: random.Random, change: Fault, names: list[str]) -> tuple[list[Fault], float]:
    """A server does not reach the next backup, or only late, while it becomes the primary of lock groups. Then it dies.

    Returns:
        The faults, and the part of the messages that is late; 0 if the weather stays.
    """
    others = draw.sample([name for name in names if name != change.target], 2)
    joins = change.kind is FaultKind.JOIN
    first, second = (change.target, others[0]) if joins else others
    at = change.at + (3.2 if joins else 0.0) + draw.uniform(0.1, 2.0)
    dies = Fault(at + draw.uniform(0.2, 1.5), FaultKind.CRASH, first, draw.uniform(0.5, 3.0))
    if draw.random() < 0.5:
        return [dies], 0.1
    return [Fault(at, FaultKind.LINK, first, draw.uniform(2.0, 5.0), second), dies], 0.0


def _failover_race(draw: random.Random, plan: Plan) -> tuple[Fault, ...]:
    """A primary does not reach its backups, and then nobody reaches it, or it dies."""
    server = draw.choice(server_names(plan.servers))
    others = [name for name in server_names(plan.servers) if name != server]
    at = draw.uniform(1.0, 4.0)
    ends_at = at + draw.uniform(0.05, 1.5)
    cuts = [Fault(at, FaultKind.LINK, server, draw.uniform(2.0, 6.0), other) for other in others]
    kind = draw.choice((FaultKind.CRASH, FaultKind.PARTITION, FaultKind.STOP))
    return *cuts, Fault(ends_at, kind, server, draw.uniform(0.5, 6.0))


__all__ = [
    "COORDINATOR",
    "FAULTS_S",
    "LIMIT_S",
    "Fault",
    "FaultKind",
    "Plan",
    "plan_of",
    "server_names",
    "worker_names",
]

"""One run of one plan: the nodes, the faults, and what must be true at the end."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from shoal.status import JobState
from simulation.invariants import Checker, Violation
from simulation.network import Network
from simulation.nodes import CoordinatorNode, ServerNode, WorkerNode, World
from simulation.places import Places
from simulation.plan import COORDINATOR, LIMIT_S, Fault, FaultKind, Plan, server_names, worker_names
from simulation.scheduler import Scheduler
from simulation.second_copies import SecondCopies

# Seconds of simulated time in which a job completes after the last fault.
COMPLETES_S = 120.0


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        plan: the run.
        events: number of events.
        seconds: simulated seconds.
        acknowledged: acknowledged pushes.
        undone: those that a restart from a checkpoint has undone.
        rule: the invariant that was broken; empty if none was.
        what: how.
        digest: digest of the order of all events; equal for equal runs.
    """

    plan: Plan
    events: int
    seconds: float
    acknowledged: int
    undone: int
    rule: str
    what: str
    digest: str


class Simulation:
    """A cluster in one process.

    Args:
        plan: the run.
        server_class: the kind of servers.
    """

    def __init__(self, plan: Plan, server_class: type[ServerNode] = ServerNode) -> None:
        self.plan = plan
        self._trace = hashlib.sha256()
        self.scheduler = Scheduler(plan.seed, self._after_each)
        self.network = Network(self.scheduler, plan.weather)
        self.checker = Checker(plan)
        self.world = World(plan, self.scheduler, self.network, self.checker)
        paces = iter(plan.paces)
        self.servers = [server_class(name, self.world, next(paces)) for name in server_names(plan.servers)]
        self.workers = [WorkerNode(name, self.world, next(paces)) for name in worker_names(plan.workers)]
        self.coordinator = CoordinatorNode(COORDINATOR, self.world, plan.paces[-1])
        self.places = Places(plan, self.coordinator, self.servers, self.checker)
        if plan.moves:
            self.world.holds_end, self.world.check_drained = self.places.holds_end, self.places.check_drained

        self._check_copies: Callable[[], object] = bool
        if plan.replicas > 1:
            copies = SecondCopies(self.coordinator, self.servers)
            self.world.watch_decision, self._check_copies = copies.watch, copies.check_held

    def run(self) -> Result:
        """Runs until the job ends, or an invariant is broken."""
        scheduler = self.scheduler
        self.coordinator.start()
        later = {fault.target for fault in self.plan.faults if fault.kind is FaultKind.JOIN}
        for node in (*self.servers, *self.workers):
            if node.name not in later:
                node.start()
        for fault in self.plan.faults:
            scheduler.at(fault.at, self._beginning(fault))
        scheduler.at(self.plan.calm_at, self.network.calm)
        rule = what = ""
        try:
            limit_s = min(LIMIT_S, self.plan.calm_at + COMPLETES_S)
            self._check_end(scheduler.run(lambda: self.coordinator.ended is not None, limit_s))
        except Violation as violation:
            rule, what = violation.rule, str(violation)
        except AssertionError as error:
            rule, what = "validate", f"{error} ({_place(error)})"
        except Exception as error:
            rule, what = type(error).__name__, f"{error!r} ({_place(error)})"
        scheduler.close()
        return Result(
            self.plan,
            scheduler.events,
            scheduler.now,
            self.checker.acknowledged,
            self.checker.undone,
            rule,
            what,
            self._trace.hexdigest()[:16],
        )

    def _after_each(self) -> None:
        self._check_copies()
        self._trace.update(b"%.6f" % self.scheduler.now)

    def _check_end(self, completes: bool) -> None:
        if not completes or self.coordinator.ended is None:
            why = self.places.problem() if self.plan.moves else ""
            now = self.scheduler.now
            raise Violation("completes", f"the job has not ended at {now:.0f} s: {self._state()} {why}")
        state, reason = self.coordinator.ended
        if state is not JobState.SUCCEEDED:
            raise Violation("succeeds", f"the job ended {state.value}: {reason}")

    def _state(self) -> str:
        job = self.coordinator.job
        if job is None or self.coordinator.life is None:
            return "no job"
        status = job.status(0.0)
        return f"{status.state.value}, {status.reason}, workers {status.workers}"

    # Faults.

    def _beginning(self, fault: Fault) -> Callable[[], object]:
        return lambda: self._begin(fault)

    def _begin(self, fault: Fault) -> None:
        node, scheduler = self.world.nodes[fault.target], self.scheduler
        scheduler.tell("FAULT", fault)
        match fault.kind:
            case FaultKind.CRASH:
                if node.life is not None:
                    node.crash()
                    node.clock.offset_s = fault.offset_s
                    scheduler.after(fault.seconds, node.start)
            case FaultKind.CRASH_TRAINER:
                node.crash_trainer()
            case FaultKind.STOP:
                node.stop(fault.seconds)
            case FaultKind.PARTITION:
                others = frozenset(self.plan.names) - {fault.target}
                scheduler.after(fault.seconds, self.network.cut(frozenset({fault.target}), others))
            case FaultKind.LINK:
                scheduler.after(fault.seconds, self.network.cut(frozenset({fault.target}), frozenset({fault.other})))
            case FaultKind.STORAGE:
                self.world.disk.away = True
                scheduler.after(fault.seconds, self._storage_returns)
            case FaultKind.CHECKPOINT:
                self.coordinator.request_checkpoint()
            case FaultKind.JOIN:
                node.start()
            case FaultKind.DRAIN:
                self.coordinator.order_drain(fault.target)
            case FaultKind.TERMINATE:
                node.draining.begin(fault.grace_s, fault.seconds)

    def _storage_returns(self) -> None:
        self.world.disk.away = False


def _place(error: BaseException) -> str:
    """Returns where an error was raised."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}" if trace else ""


def run(plan: Plan, server_class: type[ServerNode] = ServerNode, log: Callable[[str], object] | None = None) -> Result:
    """Runs a plan. `log` takes a line for each message and fault."""
    simulation = Simulation(plan, server_class)
    simulation.scheduler.log = log
    return simulation.run()


__all__ = ["COMPLETES_S", "Result", "Simulation", "run"]

"""Rig for the coordinator's state machine: a fake clock, an inspectable store, and random sequences of events."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal import errors, optim
from shoal._wire import Lease
from shoal._wire.cursor import Cursor
from shoal.consistency import Asynchronous, Synchronous
from shoal.evaluation_policy import EvaluationPolicy
from shoal.events import StateChanged
from shoal.initializers import Given
from shoal.job import Job
from shoal.status import BrokenReplica, Evaluation, JobState, JobStatus, Role, SavedCheckpoint, ServerLoad
from shoal.variables import Variable
from shoal_coordinator.cluster import Cluster, ClusterPolicy
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    BackupFailed,
    BackupMade,
    CommitCheckpoint,
    CreateShards,
    DrainOrder,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    GroupTold,
    JobRef,
    ProbeServer,
    ProgramDescription,
    Promote,
    Registration,
    RemoveWorker,
    RestoredCheckpoint,
    ScanCheckpoints,
    ServerProbed,
    SplitGroup,
    TakeCut,
    events,
)
from shoal_coordinator.persistence import ClusterRecords, restored
from shoal_coordinator.persistence.store import MemoryStore

START, HEARTBEAT_TIMEOUT_S = 1_000_000.0, 5.0
POLICY = ClusterPolicy(HEARTBEAT_TIMEOUT_S, 2)
KEEPING = ClusterPolicy(HEARTBEAT_TIMEOUT_S, 2, checkpoints=True)
VARIABLES = {"w": Variable((8, 4)), "b": Variable(4)}
GIVEN = {"w": Variable((8, 4), initializer=Given())}


# The squares of norms name the servers of a job, so its lock groups cannot move to others.
FIXED: dict[str, Any] = {"consistency": Synchronous(), "optimizer": optim.SGD(0.1, clip_norm=1.0)}


def job(name: str = "a", workers: int = 2, **options: Any) -> Job:
    options.setdefault("shards", 2)  # on two servers, small as its variables are
    options.setdefault("consistency", Asynchronous())
    return Job("m:f", name=name, workers=workers, **options)


def session(name: str = "s", workers: int = 1, **options: Any) -> Job:
    options.setdefault("shards", 2)
    options.setdefault("consistency", Asynchronous())
    return Job(name=name, workers=workers, **options)


def promised(records: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the records that must be up to date: all but jobs' tallies and reports, which are written at times."""
    return {key: record for key, record in records.items() if not key.endswith(("/tally", "/reports"))}


E = TypeVar("E", bound=Effect)


def only(effects: Sequence[Effect], kind: type[E]) -> E:
    """Returns the only effect, which must be of this kind."""
    [effect] = effects
    assert isinstance(effect, kind)
    return effect


def done_of(effect: Effect, failure: str = "") -> Any:
    """Returns the outcome of an effect about copies, which has failed if a reason is given."""
    assert isinstance(effect, AddBackup | DropBackup | Promote | ProbeServer | SplitGroup)
    match effect:
        case AddBackup() if failure:
            return BackupFailed(effect.job, effect.group, effect.term, failure, effect=effect.number)
        case AddBackup():
            return BackupMade(effect.job, effect.group, effect.term, effect=effect.number)
        case ProbeServer():
            return ServerProbed(effect.server, effect.incarnation, effect.asked_at, failure, effect=effect.number)
    if failure:
        return events.EffectFailed(effect.job, failure, shards_lost=True, effect=effect.number)
    return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)


@dataclass
class Rig:
    """A cluster machine with its clock, its disk and its effect runner."""

    policy: ClusterPolicy = POLICY
    machine: Cluster = field(init=False)
    disk: MemoryStore = field(default_factory=MemoryStore)
    now: float = START
    pending: list[Effect] = field(default_factory=list)
    performed: list[Effect] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    saved: dict[tuple[str, int], events.CutTaken] = field(default_factory=dict)  # whole checkpoints
    committed: dict[tuple[str, int], CommitCheckpoint] = field(default_factory=dict)  # with their manifests
    away: str = ""  # why they cannot be read

    def __post_init__(self) -> None:
        self.machine = Cluster("reef", self.policy, START)

    def handle(self, event: Any) -> Any:
        try:
            answer, effects = self.machine.handle(event, self.now)
            self.pending += effects
        finally:
            self.machine.validate()
            silent = not self.machine.changed
            self.write()
        told = isinstance(event, events.HeartbeatReceived) and not (event.load and event.load.broken_replicas)
        assert silent or not told, "a heartbeat is not worth a write"
        return answer

    def write(self) -> None:
        """Writes the dirty records, as after each event, and checks that no changed record was missed."""
        records = ClusterRecords(self.machine)
        self.disk.apply(records.changes())
        assert promised(self.disk.load()) == promised(records.all())

    def crash(self) -> "Rig":
        """Kills the coordinator and starts another one, which repeats the pending effects."""
        found = restored(self.disk.load(), self.policy, self.now)
        assert found
        self.machine, self.pending = found, found.pending_effects
        self.machine.validate()
        self.write()
        return self

    def join(self, role: Role, *names: str) -> "Rig":
        for name in names:
            self.processes += 1
            address = f"{name}:1" if role is Role.SERVER else ""
            registration = Registration(role, name, f"p{self.processes}", address)
            self.lives[name] = self.handle(events.RegistrationReceived(registration)).incarnation
        return self

    def servers(self, *names: str) -> "Rig":
        return self.join(Role.SERVER, *names)

    def workers(self, *names: str) -> "Rig":
        return self.join(Role.WORKER, *names)

    def beat(self, *names: str) -> list[Any]:
        """Lets members send heartbeats. Returns their assignments."""
        return [self.handle(events.HeartbeatReceived(name, self.lives[name])).assignment for name in names]

    def pass_time(self, seconds: float, *silent: str) -> "Rig":
        """Lets time pass. All members send heartbeats, except the silent ones."""
        end, tick = self.now + seconds, 1.0 if seconds < 60 else HEARTBEAT_TIMEOUT_S / 2
        while self.now < end:
            self.now = min(end, self.now + tick)
            alive = [m.member for m in self.machine.status(self.now).members if m.alive and m.member not in silent]
            self.beat(*alive)
            self.handle(events.TimePassed())
        return self

    def kill(self, *names: str) -> "Rig":
        return self.pass_time(HEARTBEAT_TIMEOUT_S + 1.5, *names)

    def replace(self, server: str) -> "Rig":
        """Kills a server. Its next process registers before the coordinator knows that the server is lost."""
        self.pass_time(HEARTBEAT_TIMEOUT_S, server)
        assert self.machine.members.is_alive(server)
        self.now += 0.1
        return self.servers(server)

    def drain(self, name: str, left_s: float | None = None) -> Any:
        """Asks a server to drain. Returns the jobs that the server must wait for."""
        return self.handle(events.DrainRequested(name, self.lives[name], left_s))

    def order_drain(self, name: str, *, stay: bool = False, force: bool = False) -> None:
        """Lets a user order that a server drains."""
        self.handle(events.DrainOrdered(name, DrainOrder(stay=stay, force=force)))

    def break_replica(
        self, reporter: str, job: str, group: int, *, term: int | None = None, sends: bool | None = None
    ) -> None:
        """Lets a server report that a connection of a group broke: that of the primary and its backup by default."""
        machine = self.machine.job(job)
        known = {it.group: it for it in machine.copies.groups}
        found = known.get(group, known[min(known)])  # of a part that the coordinator does not know
        assert machine.placement
        report = BrokenReplica(
            job,
            machine.placement.generation,
            group,
            (found.backup_term or found.term) if term is None else term,
            primary=found.primary.member == reporter if sends is None else sends,
            reason="the connection broke",
        )
        load = ServerLoad(broken_replicas=(report,))
        self.handle(events.HeartbeatReceived(reporter, self.lives[reporter], load=load))

    def leave(self, name: str) -> None:
        self.handle(events.MemberLeft(name, self.lives[name]))

    def submit(self, spec: Job) -> Any:
        return self.handle(events.JobSubmitted(spec))

    def part(self, name: str, worker: str) -> int:
        """Returns the number of a worker's assignment in a job, or 0."""
        try:
            return self.machine.job(name).assignment_of(worker)
        except errors.UnknownJob:
            return 0

    def describe(
        self, name: str, worker: str, variables: Mapping[str, Variable] = VARIABLES, samples: int = 100
    ) -> Any:
        part = self.part(name, worker)
        return self.handle(
            events.JobDescribed(name, worker, self.lives[worker], ProgramDescription(variables, samples), part)
        )

    def enter(self, name: str, worker: str, assigned: bool = False, *, waits: bool = False) -> Any:
        part = self.part(name, worker)
        return self.handle(events.JoinRequested(name, worker, self.lives[worker], assigned, part, waits=waits))

    def lease(self, name: str, worker: str, done: int = 0) -> Any:
        part = self.part(name, worker)
        return self.handle(events.LeaseRequested(name, worker, self.lives[worker], done, part))

    def report(self, name: str, worker: str, **counts: Any) -> Any:
        part = self.part(name, worker)
        return self.handle(events.WorkerReported(name, worker, self.lives[worker], assignment=part, **counts))

    def ask(self, name: str, worker: str, step: int, *, finished_training: bool = False) -> Any:
        part = self.part(name, worker)
        return self.handle(events.EvaluationClaimed(name, worker, self.lives[worker], step, finished_training, part))

    def evaluate(self, name: str, worker: str, number: int, **values: Any) -> Any:
        """Reports an evaluation. Returns the answer to the worker."""
        result = Evaluation(number, 7, values, samples=10, seconds=0.5)
        part = self.part(name, worker)
        return self.handle(events.EvaluationReported(name, worker, self.lives[worker], result, part))

    def finish(
        self, name: str, worker: str, error: str = "", *, shards_lost: bool = False, cursor: Cursor | None = None
    ) -> None:
        part, life = self.part(name, worker), self.lives[worker]
        self.handle(events.WorkerFinished(name, worker, life, error, part, shards_lost=shards_lost, cursor=cursor))

    def perform(self, *, step: int = 0, until: type | tuple[type, ...] = ()) -> list[Effect]:
        """Performs pending effects, and those that follow, up to the first of a kind. Returns the performed effects."""
        done = []
        while self.pending and not isinstance(self.pending[0], until):
            done.append(self.perform_first(step))
        return done

    def perform_first(self, step: int = 0) -> Effect:
        """Performs the first pending effect, and returns it."""
        effect = self.pending.pop(0)
        self.performed.append(effect)
        if isinstance(effect, CreateShards):
            self.create(effect)
        elif isinstance(effect, ScanCheckpoints):
            self.handle(events.CheckpointsScanned(effect.job, self.largest(effect.job.name), effect=effect.number))
        elif isinstance(effect, TakeCut):
            self.cut(effect, step)
        elif isinstance(effect, CommitCheckpoint):
            self.commit_checkpoint(effect)
        elif isinstance(effect, AddBackup | DropBackup | Promote | ProbeServer | SplitGroup):
            self.handle(done_of(effect))
        elif isinstance(effect, AdmitWorker):
            self.handle(events.WorkerAdmitted(effect.job, effect.assignment, step, effect=effect.number))
        else:
            if isinstance(effect, RemoveWorker) and effect.committed_steps is None:
                with suppress(errors.Cancelled):  # a failover has replaced the effect
                    self.handle(events.WorkerFenced(effect.number, step))
            self.handle(events.EffectDone(effect=effect.number))
        return effect

    def create(self, effect: Any) -> None:
        restored = None
        if effect.sources and self.away:
            self.handle(events.RestoreDeferred(effect.job, self.away, effect=effect.number))
            return
        if effect.sources:
            source = effect.sources[0]
            newest = max((number for job, number in self.saved if job == source.job), default=0)
            source = replace(source, number=source.number or newest)
            cut = self.saved[source.job, source.number]
            names = frozenset(effect.placement.variables)
            restored = RestoredCheckpoint(source, cut.step, names, cut.data, cut.progress_totals, effect.spec.seed)
            saved = self.committed.get((source.job, source.number))
            if saved and saved.spec.optimizer == effect.spec.optimizer:
                restored = replace(restored, learning_rate=saved.learning_rate, plateau=saved.plateau)
        self.handle(events.ShardsCreated(effect.job, restored, effect=effect.number))

    def largest(self, name: str) -> int:
        return max((number for job, number in self.saved if job == name), default=0)

    def cut(self, effect: Any, step: int) -> None:
        assert (effect.job.name, effect.checkpoint) not in self.saved, "a number is used twice"
        try:
            held = self.handle(events.CutHeld(effect.job))
        except errors.Cancelled as error:
            self.handle(events.CheckpointFailed(effect.job, error.message, effect=effect.number))
            return
        data = Ledger.from_proto(held.ledger).settled({}, held.ranks) if held.ledger else None
        cut = events.CutTaken(
            effect.job,
            effect.checkpoint,
            step,
            version=step,
            time=self.now,
            data=data,
            progress_totals=held.progress_totals,
            held_by=effect.number if effect.last else 0,
            effect=effect.number,
        )
        self.handle(cut)

    def commit_checkpoint(self, effect: Any) -> None:
        cut = effect.cut
        self.saved[effect.job.name, cut.number] = cut
        self.committed[effect.job.name, cut.number] = effect
        saved = SavedCheckpoint(cut.number, cut.step, 100, cut.time)
        best = effect.best.number if effect.best else 0
        last = bool(cut.held_by)
        self.handle(events.CheckpointPublished(effect.number, effect.job, saved, best))
        self.handle(events.CheckpointCommitted(effect.job, saved, best=best, last=last, effect=effect.number))

    def start(
        self, name: str, *workers: str, variables: Mapping[str, Variable] = VARIABLES, samples: int = 100, step: int = 0
    ) -> "Rig":
        """Brings a job to RUNNING. Its workers begin at `step`."""
        for worker in workers:
            self.describe(name, worker, variables, samples)
        self.perform()
        for worker in workers:
            self.enter(name, worker)
        self.perform(step=step)
        return self

    def status(self, name: str) -> JobStatus:
        return self.machine.job(name).status(self.now)

    def checkpoint(self, name: str) -> SavedCheckpoint:
        """Returns the newest checkpoint of a job, which must have one."""
        found = self.status(name).checkpoint
        assert found, f"{name} has no checkpoint"
        return found

    def state(self, name: str) -> JobState:
        return self.status(name).state

    def history(self, name: str) -> list[tuple[str, str]]:
        log = self.machine.job(name).log.after(0)
        return [(event.state.value, event.reason) for event in log if isinstance(event, StateChanged)]


class Voyage(RuleBasedStateMachine):
    """Random members and jobs come and go, and effects are performed late. The machine must keep its invariants."""

    new_rig = Rig
    policy = replace(POLICY, smallest_move_bytes=1)
    names = st.sampled_from(["a", "b", "c"])
    members = st.sampled_from(["s0", "s1", "s2", "w0", "w1", "w2", "x", "y"])

    @initialize()
    def begin(self) -> None:
        self.terms: dict[tuple[JobRef, int, int], int] = {}
        self.rig = self.new_rig(self.policy).servers("s0", "s1", "s2").workers("w0", "w1").join(Role.SESSION, "x")

    @rule(member=members)
    def come(self, member: str) -> None:
        role = {"s": Role.SERVER, "w": Role.WORKER}.get(member[0], Role.SESSION)
        self.attempt(lambda: self.rig.join(role, member))

    @rule(member=members)
    def go(self, member: str) -> None:
        if member in self.rig.lives:
            self.rig.leave(member)

    @rule(member=members)
    def drain(self, member: str) -> None:
        if self.rig.machine.members.is_alive(member):
            self.attempt(lambda: self.rig.drain(member))

    @rule(member=members, stay=st.booleans(), force=st.booleans())
    def order_drain(self, member: str, stay: bool, force: bool) -> None:
        self.attempt(lambda: self.rig.order_drain(member, stay=stay, force=force))

    @rule(silent=st.sets(members, max_size=2))
    def die(self, silent: set[str]) -> None:
        self.rig.kill(*silent)

    @rule(
        name=names,
        workers=st.integers(1, 3),
        least=st.sampled_from([0, 1]),
        more=st.integers(0, 2),
        is_session=st.booleans(),
        evaluates=st.booleans(),
        run=st.booleans(),
        replicas=st.sampled_from([1, 2]),
    )
    def submit(
        self,
        name: str,
        workers: int,
        least: int,
        more: int,
        is_session: bool,
        evaluates: bool,
        run: int,
        replicas: int,
    ) -> None:
        options: dict[str, Any] = {"min_workers": least, "max_workers": workers + more}
        copies = {"replicas": replicas, "min_replicas": 1}
        if evaluates:
            keeps = self.policy.checkpoints
            options["evaluation"] = EvaluationPolicy(every_steps=2, patience=2, checkpoint_best=keeps)
        spec = session(name, workers, **copies) if is_session else job(name, workers, **copies, **options)
        self.attempt(lambda: self.rig.submit(spec))
        if run:
            self.run_jobs()

    @rule(name=names, kind=st.sampled_from([events.JobCancelled, events.JobDropped]))
    def end(self, name: str, kind: type[events.JobCancelled] | type[events.JobDropped]) -> None:
        self.attempt(lambda: self.rig.handle(kind(name)))

    @rule(name=names, member=members, given=st.booleans())
    def describe(self, name: str, member: str, given: bool) -> None:
        self.attempt(lambda: self.rig.describe(name, member, GIVEN if given else VARIABLES))

    @rule(name=names, member=members, assigned=st.booleans())
    def enter(self, name: str, member: str, assigned: bool) -> None:
        self.attempt(lambda: self.rig.enter(name, member, assigned))

    @rule(name=names, member=members)
    def train(self, name: str, member: str) -> None:
        def once() -> None:
            lease = self.rig.lease(name, member)
            if isinstance(lease, Lease):
                self.rig.lease(name, member, lease.number)

        self.attempt(once)

    @rule(
        name=names,
        member=members,
        step=st.integers(0, 9),
        finished_training=st.booleans(),
        loss=st.sampled_from([0.5, 0.25, float("nan"), None]),
    )
    def evaluate(self, name: str, member: str, step: int, finished_training: bool, loss: float) -> None:
        def check_once() -> None:
            asked = self.rig.ask(name, member, step, finished_training=finished_training)
            assert self.rig.ask(name, member, step, finished_training=finished_training) == asked, (
                "a call that is repeated"
            )
            if asked.number and loss is not None:
                self.rig.evaluate(name, member, asked.number, loss=loss)

        self.attempt(check_once)

    @rule(name=names, member=members, error=st.sampled_from(["", "", "", "boom"]), shards_lost=st.booleans())
    def finish(self, name: str, member: str, error: str, shards_lost: bool) -> None:
        self.attempt(lambda: self.rig.finish(name, member, error, shards_lost=shards_lost and bool(error)))

    @rule(name=names, place=st.integers(0, 1), primary=st.booleans(), late=st.booleans())
    def break_replica(self, name: str, place: int, primary: bool, late: bool) -> None:
        def report() -> None:
            groups = self.rig.machine.job(name).copies.groups[place:]
            group = groups[0] if groups else None
            server = group and (group.primary if primary else group.second)
            if group and server:
                event("a connection between copies broke")
                self.rig.break_replica(server.member, name, group.group, term=group.term - late)

        self.attempt(report)

    @rule(silent=st.sampled_from(["s0", "s1", "s2"]))
    def lose_backed_up(self, silent: str) -> None:
        """Loses a server whose groups have complete backups: jobs go on without a restart."""
        machine = self.rig.machine
        if not machine.members.is_alive(silent):
            return
        usable = {it.id for it in machine.members.not_draining} - {silent}
        kept = {
            job.ref: job.status(self.rig.now)
            for job in machine.submitted.values()
            if job.created
            and any(it.primary.member == silent for it in job.copies.groups)
            and all(it.backup and it.backup.member in usable for it in job.copies.groups if it.primary.member == silent)
        }
        self.rig.leave(silent)
        for ref, before in kept.items():
            event("a job continues with backups")
            after = machine.job(ref.name).status(self.rig.now)
            assert (after.restarts, after.state) == (before.restarts, before.state)
            assert after.failovers == before.failovers + 1

    @rule(name=names)
    def checkpoint(self, name: str) -> None:
        self.attempt(lambda: self.rig.handle(events.CheckpointRequested(name)))

    @rule(fails=st.booleans(), shards_lost=st.booleans())
    def perform_one(self, fails: bool, shards_lost: bool) -> None:
        if self.rig.pending:
            effect = self.rig.pending[0]
            if fails and isinstance(effect, ScanCheckpoints | TakeCut | CommitCheckpoint):
                self.rig.pending.pop(0)
                self.rig.handle(events.CheckpointFailed(effect.job, "the disk is full", effect=effect.number))
            elif fails and isinstance(effect, CreateShards) and effect.sources:
                self.rig.pending.pop(0)
                self.rig.handle(events.RestoreDeferred(effect.job, "the storage is away", effect=effect.number))
            elif fails and isinstance(effect, AddBackup | ProbeServer | DropBackup | Promote):
                self.rig.pending.pop(0)
                self.rig.handle(done_of(effect, "it does not answer"))
            elif fails and not isinstance(effect, DropShards | DropCopy):
                self.rig.pending.pop(0)
                self.rig.handle(
                    events.EffectFailed(effect.job, "it went wrong", shards_lost=shards_lost, effect=effect.number)
                )
            else:
                later, self.rig.pending = self.rig.pending[1:], [effect]
                self.rig.perform()
                self.rig.pending += later

    @rule()
    def crash(self) -> None:
        abandoned = {effect.number for effect in self.rig.pending} - {
            effect.number for effect in self.rig.machine.pending_effects
        }
        before = sorted(effect.number for effect in self.rig.pending if effect.number not in abandoned)
        self.rig.crash()
        # A coordinator that starts does not know of the pauses after copies that failed, and begins others at once.
        after = [it.number for it in self.rig.pending if not isinstance(it, AddBackup) or it.number in before]
        assert after == before

    @rule(name=names, member=members, count=st.integers(0, 9))
    def report(self, name: str, member: str, count: int) -> None:
        self.attempt(lambda: self.rig.report(name, member, step=count, accepted=count, log=("a line",)))

    @rule()
    def run_jobs(self) -> None:
        """Runs jobs to success, a path that random events seldom take."""
        self.rig.perform()
        for status in self.rig.machine.jobs(self.rig.now):
            workers = ("x", "y", "w0") if status.job.is_session else status.workers
            for worker in workers if not status.state.finished else ():
                self.attempt(partial(self.rig.start, status.name, worker))
        event(f"running: {sum(s.state is JobState.RUNNING for s in self.rig.machine.jobs(self.rig.now))}")

    def attempt(self, call: Callable[[], object]) -> None:
        before = self.rig.machine.jobs(self.rig.now)
        try:
            call()
        except KeyError:
            pass  # of the rig: a member that never was
        except errors.ShoalError:
            known = {status.name: status.state for status in self.rig.machine.jobs(self.rig.now)}
            ended = {status.name for status in before if status.state.finished}
            assert all(known.get(name, JobState.FAILED).finished for name in ended), "a refusal woke the ended"

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.machine.validate()
            for job in self.rig.machine.submitted.values():
                generation = job.placement.generation if job.placement else 0
                for group in job.copies.groups:
                    key = job.ref, generation, group.group
                    assert group.term >= self.terms.get(key, 0), "a term went back"
                    self.terms[key] = group.term
            lives: dict[tuple[JobRef, str, int], int] = {}  # with the assignment of each
            for effect in self.rig.performed:
                if isinstance(effect, CreateShards):  # which know of nobody yet
                    lives = {life: assignment for life, assignment in lives.items() if life[0] != effect.job}
                if isinstance(effect, AdmitWorker):
                    life = effect.job, effect.worker, effect.incarnation
                    # An admission is repeated if another server has become the primary meanwhile.
                    known = lives.setdefault(life, effect.assignment)
                    assert known == effect.assignment, "servers refuse a life that was released"

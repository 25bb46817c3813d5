"""The worker's daemon: a member of the cluster that runs a trainer for what it is assigned.

What to run is decided by `shoal_worker.assignment`; here events come in and effects are performed, all on one thread,
so that nothing but the queue is shared.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import structlog
from prometheus_client import CollectorRegistry

from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient, RpcServer
from shoal._training import Outbox
from shoal._training.participant import Participant
from shoal._wire import Cursor, ReportAck
from shoal.v1 import coordinator_pb2
from shoal_worker.arrays import choose_device
from shoal_worker.assignment import (
    Assigned,
    AssignedJob,
    AssignmentMachine,
    Effect,
    Event,
    Finish,
    IncarnationChanged,
    JobOver,
    Leave,
    Renew,
    StartTrainer,
    StopAfterBatchRequested,
    StopRequested,
    StopTrainer,
    StopTrainerAfterBatch,
    TrainerEnded,
)
from shoal_worker.messages import Instructions, TrainerOutcome, TrainerReport
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.trainer_process import TrainerExit, TrainerProcess

_log = structlog.get_logger(__name__)

# Events wait here while one is dealt with; heartbeats bring one a second.
_MAX_EVENTS = 256
# How often figures and lines go to the coordinator while there is a trainer.
_SHIP_EVERY_S = 0.25

StartProcess = Callable[..., TrainerProcess]


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is told by flags.

    Attributes:
        coordinator: host:port.
        name: member id, 1 to 63 characters of [a-z0-9-].
        device: "auto", "cpu" or "cuda:N".
        paths: folders that programs are imported from, before all others.
        retry_for_s: how long calls are repeated while nobody answers, in seconds.
        stop_grace_s: seconds that a trainer gets to end when it is told to.
        leave_grace_s: seconds that `leave` lets it take to finish its batch.
        listen: host:port of the health service; port 0 takes any free one.
        advertise: host that others reach it by; empty: the one bound.
        device_memory_limit: of a GPU: bytes, or a share of it if at most 1; 0: none.
    """

    coordinator: str
    name: str
    device: str = "auto"
    paths: tuple[str, ...] = (".",)
    retry_for_s: float = 30.0
    stop_grace_s: float = 3.0
    leave_grace_s: float = 30.0
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    device_memory_limit: float = 0.0


@dataclass
class _JobRun:
    """This worker's part in one job, from its trainer's start until the coordinator was told of its end."""

    work: AssignedJob
    participant: Participant
    outbox: Outbox = field(default_factory=Outbox)
    process: TrainerProcess | None = None  # None: it could not be started
    progressed: bool = False  # a server took a push; written by the thread that reads figures, read after its end
    winding_up: bool = False  # its trainer was told that there is nothing more to do
    farewell: Finish | None = None  # what to finish with; None: the trainer has not ended


class Daemon:
    """A running worker. Made by `start_worker`.

    Args:
        config: what to be.
        client: the way to the coordinator; closed by `stop`.
        health: says that it is alive; stopped by `stop`.
        device: the name of the device, for people.
        metrics: what trainers did.
        metrics_address: where they are served.
        start_process: makes a `TrainerProcess`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        client: CoordinatorClient,
        health: RpcServer,
        device: str,
        metrics: WorkerMetrics,
        *,
        metrics_address: str = "",
        start_process: StartProcess = TrainerProcess,
    ) -> None:
        self._config, self._client, self._health, self._metrics = config, client, health, metrics
        self.address = health.address
        self._start_process = start_process
        self._events: queue.Queue[Event] = queue.Queue(_MAX_EVENTS)
        self._machine = AssignmentMachine()  # touched by _thread alone, as is _part
        self._part: _JobRun | None = None
        self._cursor: Cursor | None = None  # where the trainer left its data; read after _thread's end
        self._left = threading.Event()
        self._membership = MembershipClient(
            client,
            coordinator_pb2.RegisterRequest(
                role=coordinator_pb2.WORKER,
                member=config.name,
                address=self.address,
                device=device,
                metrics_address=metrics_address,
            ),
            on_reply=self._on_heartbeat,
            on_incarnation=lambda incarnation: self._events.put(IncarnationChanged(incarnation)),
        )
        self._thread = threading.Thread(target=self._run, name="daemon", daemon=True)

    def start(self) -> None:
        """Registers, and begins to take work.

        Raises:
            Unreachable: no coordinator answered for `retry_for_s` seconds.
            DuplicateMember: a live process has this name.
            WrongVersion: the coordinator is of another version.
        """
        self._membership.start(retry_for_s=self._config.retry_for_s)
        self._thread.start()
        self._health.set_ready(True)

    def leave(self, enough: threading.Event) -> None:
        """Has the trainer finish the batch in hand, so that `stop` gives back the rest of its data and nothing twice.

        Args:
            enough: set to wait no longer; `leave_grace_s` seconds are waited at most. Set here when it is done.
        """
        self._health.set_ready(False)
        self._left = enough
        self._events.put(StopAfterBatchRequested())
        if not enough.wait(self._config.leave_grace_s):
            _log.warning("its batch is not finished in time", seconds=self._config.leave_grace_s)

    def stop(self) -> None:
        self._health.set_ready(False)
        self._events.put(StopRequested())
        self._thread.join()
        self._membership.stop(self._cursor)
        self._client.close()
        self._health.stop()

    # Events, from other threads.

    def _on_heartbeat(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        work = AssignedJob(reply.job, reply.assignment, self._membership.incarnation) if reply.job else None
        try:
            self._events.put_nowait(Assigned(work))
        except queue.Full:  # the next heartbeat says it again
            _log.warning("too busy to hear what to work on")

    def _on_figures(self, part: _JobRun, figures: TrainerReport) -> None:
        part.progressed = part.progressed or figures.report.accepted > 0
        part.outbox.add_metrics(figures.report)
        self._metrics.add(figures)

    # The daemon's thread.

    def _run(self) -> None:
        while not self._machine.done:
            try:
                self._take_turn()
            except Exception:  # a defect; this thread must outlive it, or nobody would ever stop the trainer
                _log.exception("a turn failed")
        self._left.set()

    def _take_turn(self) -> None:
        try:
            event = self._events.get(timeout=_SHIP_EVERY_S if self._part else None)
        except queue.Empty:
            pass
        else:
            self._handle(event)
        self._tell_coordinator()
        self._metrics.set_lines_waiting(self._part.outbox.lines_waiting if self._part else 0)

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event):
            _log.debug("to do", effect=effect)
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        part = self._part
        match effect:
            case StartTrainer(work):
                self._start_trainer(work)
            case StopTrainerAfterBatch() if part and part.process:
                _log.info("finishing the batch in hand", job=part.work.job)
                part.process.retire()
            case Leave(cursor):
                self._cursor = cursor
            case StopTrainer() if part and part.process:
                part.process.stop(self._config.stop_grace_s)
            case Finish(error) if part:
                _log.info("job ends here", job=part.work.job, error=error or None)
                part.farewell = effect
            case Renew(reason) if part:
                _log.warning("beginning a new life", job=part.work.job, reason=reason)
                self._metrics.count("trainer_crashes")
                part.outbox.add_line(f"{reason}; another worker, or this one, starts anew")
                self._ship(part)  # in this life, or never
                self._part = None
                self._membership.renew()

    def _start_trainer(self, work: AssignedJob) -> None:
        config = self._config
        _log.info("starting a trainer", job=work.job, assignment=work.assignment)
        part = _JobRun(work, Participant(self._client, work.job, config.name, work.incarnation, work.assignment))
        self._part = part
        instructions = Instructions(
            coordinator=config.coordinator,
            job=work.job,
            worker=config.name,
            incarnation=work.incarnation,
            assignment=work.assignment,
            device=config.device,
            device_memory_limit=config.device_memory_limit,
            paths=config.paths,
            retry_for_s=config.retry_for_s,
            reports_fd=-1,
        )

        def on_end(ending: TrainerExit) -> None:
            self._metrics.count("log_lines_dropped", part.outbox.lines_lost)
            self._metrics.trainer_ended()
            self._events.put(TrainerEnded(ending.status, ending.outcome, part.progressed))

        self._metrics.trainer_started()
        try:
            part.process = self._start_process(
                instructions,
                on_figures=lambda figures: self._on_figures(part, figures),
                on_line=part.outbox.add_line,
                on_end=on_end,
            )
        except OSError as error:
            self._metrics.trainer_ended()
            self._handle(
                TrainerEnded(1, TrainerOutcome(f"worker {config.name} cannot start a trainer: {error}"), False)
            )

    def _tell_coordinator(self) -> None:
        """Sends what there is: figures and lines, and after the last of them the end."""
        part = self._part
        if part is None:
            return
        shipped = self._ship(part)
        if part.farewell is None:
            if self._machine.running != part.work:
                self._part = None  # its trainer was told to stop: nobody waits for how it ended
            return
        if not shipped:
            return
        try:
            part.participant.finish(part.farewell.error, lost=part.farewell.lost, retry_for_s=0)
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            _log.debug("could not finish yet", job=part.work.job, reason=error.message)
            return
        except errors.ShoalError as error:  # fenced, or the job is gone: nobody waits for this
            _log.info("the end of a job was not wanted", job=part.work.job, reason=error.message)
        self._part = None
        self._membership.heartbeat_now()  # there may be other work

    def _ship(self, part: _JobRun) -> bool:
        """Sends figures and lines; False if some are left for later."""
        while report := part.outbox.take():
            try:
                heard = part.participant.report(report)
            except (errors.Unreachable, errors.DeadlineExceeded):  # the trainer goes on; so do we
                part.outbox.put_back(report)
                return False
            except errors.ShoalError as error:  # fenced, or the job is gone: a heartbeat will say what next
                _log.info("a report was not wanted", job=part.work.job, reason=error.message)
                return True
            if part.farewell is None and self._machine.running == part.work:
                self._heed(part, heard)
        return True

    def _heed(self, part: _JobRun, heard: ReportAck) -> None:
        if heard is ReportAck.DONE:
            self._handle(JobOver(part.work))
        if heard is ReportAck.STOP_AFTER_BATCH and part.process and not part.winding_up:
            part.winding_up = True
            part.process.wind_up()


def start_worker(config: WorkerConfig, registry: CollectorRegistry, metrics_address: str = "") -> Daemon:
    """Starts a worker in this process; its trainers are processes of their own.

    Raises:
        ShoalError: the device is not there, no coordinator answers, or the name or port is taken.
    """
    with ExitStack() as undo:
        chosen = choose_device(config.device)
        device = chosen.name
        _log.info("training on", device=device, reason=chosen.reason or None)
        client = CoordinatorClient(config.coordinator, retry_for_s=config.retry_for_s)
        undo.callback(client.close)
        health = RpcServer(config.listen, [], threads=2, advertise=config.advertise)
        undo.callback(health.stop)
        health.start()
        metrics = WorkerMetrics(registry, device, client.retries)
        daemon = Daemon(config, client, health, device, metrics, metrics_address=metrics_address)
        daemon.start()
        undo.pop_all()
    return daemon

"""Daemon of a worker: a cluster member that runs a trainer for its assigned job.

`shoal_worker.assignment` decides what to run. The daemon takes events from a queue and carries out effects, all on one
thread. Threads share only the queue.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient, RpcServer
from shoal._security import NO_CREDENTIALS, Authorizer, Credentials
from shoal._training import Outbox
from shoal._training.participant import Participant
from shoal._wire import Cursor, ReportAck
from shoal.v1 import coordinator_pb2
from shoal_worker.allowed_programs import DEFAULT_PATTERNS, AllowedPrograms
from shoal_worker.assignment import (
    Assigned,
    AssignedJob,
    AssignmentEffect,
    AssignmentEvent,
    AssignmentMachine,
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
    why_stopped,
)
from shoal_worker.isolation import TrainerIsolation
from shoal_worker.messages import Instructions, TrainerOutcome, TrainerReport
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.tickets import reply_to
from shoal_worker.trainer_process import TrainerExit, TrainerProcess

_log = structlog.get_logger(__name__)

# Bound of the event queue; heartbeats add at most two events a second by default.
_MAX_EVENTS = 256
# Interval at which this daemon checks for something to report while a trainer runs. The coordinator paces the reports.
_LOOK_EVERY_S = 0.25

# Seconds that a killed trainer may take to end. Only one that is stuck in a driver takes longer.
KILLED_S = 10.0

StartProcess = Callable[..., TrainerProcess]


@dataclass(frozen=True)
class WorkerConfig:
    """Options of a worker.

    Attributes:
        coordinator: host:port.
        name: member id, 1 to 63 characters of [a-z0-9-].
        device: "auto", "cpu" or "cuda:N".
        paths: folders that programs are imported from, before all others.
        allow_programs: patterns of the programs that jobs may name; see `AllowedPrograms`.
        retry_for_s: seconds for which unanswered calls are repeated.
        stop_grace_s: seconds between SIGTERM and SIGKILL of a trainer.
        leave_grace_s: seconds that a trainer has to finish its batch after `leave`.
        listen: host:port of the health service; port 0 takes any free port.
        advertise: host name that others connect to; empty means the bound one.
        device_memory_limit: limit of GPU memory: bytes, or a share if at most 1; 0 means no limit.
        isolation: the environment, limits and user of trainers.
        credentials: what the worker presents. With TLS settings, its port accepts TLS only.
    """

    coordinator: str
    name: str
    device: str = "auto"
    paths: tuple[str, ...] = (".",)
    allow_programs: tuple[str, ...] = DEFAULT_PATTERNS
    retry_for_s: float = 30.0
    stop_grace_s: float = 3.0
    leave_grace_s: float = 30.0
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    device_memory_limit: float = 0.0
    isolation: TrainerIsolation = field(default_factory=TrainerIsolation)
    credentials: Credentials = NO_CREDENTIALS


@dataclass
class _JobRun:
    """This worker's part in one job, from the trainer's start until the coordinator knows its end."""

    assigned: AssignedJob
    participant: Participant
    outbox: Outbox = field(default_factory=Outbox)
    process: TrainerProcess | None = None  # None if it could not be started
    progressed: bool = False  # a server accepted a push; written by the thread that reads reports
    finishing: bool = False  # the trainer was asked to stop after its batch
    over: bool = False  # the coordinator has answered that this assignment has ended
    end: Finish | Renew | None = None  # what follows the last report; None while the trainer runs


class Daemon:
    """A running worker. `shoal_worker.process` creates it.

    Args:
        config: the worker's options.
        client: client of the coordinator; closed by `stop`.
        health: server of the health service; stopped by `stop`.
        device: display name of the device.
        metrics: metrics of the trainers.
        metrics_address: host:port of the metrics endpoint.
        start_process: creates a `TrainerProcess`.
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
        self.address, self.authorizer = health.address, Authorizer()
        self._start_process = start_process
        self._allowed_programs = AllowedPrograms(config.paths, config.allow_programs)
        self._events: queue.Queue[AssignmentEvent] = queue.Queue(_MAX_EVENTS)
        self._machine = AssignmentMachine()  # used by _thread only, as is _job_run
        self._job_run: _JobRun | None = None
        self._cursor: Cursor | None = None  # the trainer's last position; read after _thread has ended
        self._drained = threading.Event()
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
            authorizer=self.authorizer,
            on_incarnation=lambda incarnation: self._events.put(IncarnationChanged(incarnation)),
        )
        self._thread = threading.Thread(target=self._run, name="daemon", daemon=True)

    def start(self) -> None:
        """Registers with the coordinator and accepts jobs.

        Raises:
            Unreachable: no coordinator answered for `retry_for_s` seconds.
            DuplicateMember: a live process has this name.
            WrongVersion: the coordinator has another version.
            StartFailed: the coordinator asks for no tokens, and the worker was started without --insecure.
        """
        self._membership.start(retry_for_s=self._config.retry_for_s)
        self._thread.start()
        self._health.set_ready(True)

    def leave(self, stop_now: threading.Event) -> None:
        """Drains the worker: the trainer finishes its batch, and `stop` returns the rest of its range.

        Waits for at most `leave_grace_s` seconds.

        Args:
            stop_now: the caller sets it to end the wait; the worker sets it when it has drained.
        """
        self._health.set_ready(False)
        self._drained = stop_now
        self._events.put(StopAfterBatchRequested())
        if not stop_now.wait(self._config.leave_grace_s):
            _log.warning("batch not finished within the grace period", seconds=self._config.leave_grace_s)

    def stop(self) -> None:
        """Stops the trainer, leaves the cluster and closes all connections."""
        self._health.set_ready(False)
        self._events.put(StopRequested())
        self._thread.join(self._config.stop_grace_s + KILLED_S)
        if self._thread.is_alive():
            _log.error("trainer does not end although it was killed; leaving without it")
        self._membership.stop(self._cursor)
        self._client.close()
        self._health.stop()

    # Events, from other threads.

    def _on_heartbeat(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        part = reply.assignment, self._membership.incarnation
        whose = reply.submitter, reply.submitter_role
        assigned = AssignedJob(reply.job, *part, reply.program, *whose) if reply.job else None
        try:
            self._events.put_nowait(Assigned(assigned))
        except queue.Full:  # the next heartbeat repeats it
            _log.warning("event queue full; assignment deferred until the next heartbeat")

    def _on_report(self, run: _JobRun, report: TrainerReport) -> None:
        run.progressed = run.progressed or report.report.accepted > 0
        run.outbox.add_metrics(report.report)
        self._metrics.add(report)

    # The daemon's thread.

    def _run(self) -> None:
        while not self._machine.done:
            try:
                self._handle_next()
            except Exception:  # a defect; this thread must survive it, because it stops the trainer
                _log.exception("event failed")
        self._drained.set()

    def _handle_next(self) -> None:
        try:
            event = self._events.get(timeout=self._look_again_s() if self._job_run else None)
        except queue.Empty:
            pass
        else:
            self._handle(event)
        self._report_to_coordinator()
        self._metrics.set_lines_waiting(self._job_run.outbox.lines_waiting if self._job_run else 0)

    def _look_again_s(self) -> float:
        due_s = self._membership.pace.report_due_s
        return min(due_s, _LOOK_EVERY_S) if due_s > 0 else _LOOK_EVERY_S

    def _handle(self, event: AssignmentEvent) -> None:
        for effect in self._machine.handle(event):
            _log.debug("effect", effect=effect)
            self._perform(effect)

    def _perform(self, effect: AssignmentEffect) -> None:
        run = self._job_run
        match effect:
            case StartTrainer(assigned):
                self._start_trainer(assigned)
            case StopTrainerAfterBatch() if run and run.process:
                _log.info("draining: finishing the current batch", job=run.assigned.job)
                run.process.leave_after_batch()
            case Leave(cursor):
                self._cursor = cursor
            case StopTrainer() if run and run.process:
                run.process.stop(self._config.stop_grace_s)
            case Finish(error) if run:
                if not effect.shards_lost:  # otherwise the coordinator knows why, once it has the report
                    _log.info("job finished on this worker", job=run.assigned.job, error=error or None)
                run.end = effect
            case Renew(reason) if run:
                run.outbox.add_line(f"{reason}; a new trainer is started on this worker or another one")
                run.end = effect  # the next incarnation cannot send the reports of this one

    def _renew(self, run: _JobRun, reason: str) -> None:
        """Becomes a new incarnation, unless the assignment has ended.

        If it has ended, that is why servers refused the trainer, and no new incarnation is needed.
        """
        if run.over:
            self._log_stopped(run, reason)
            self._membership.heartbeat_now()
            return
        _log.warning("registering as a new incarnation", job=run.assigned.job, reason=reason)
        self._metrics.count("trainer_crashes")
        self._membership.renew()

    def _start_trainer(self, assigned: AssignedJob) -> None:
        config = self._config
        _log.info("starting a trainer", job=assigned.job, assignment=assigned.assignment)
        run = _JobRun(
            assigned, Participant(self._client, assigned.job, config.name, assigned.incarnation, assigned.assignment)
        )
        self._job_run = run
        instructions = Instructions(
            coordinator=config.coordinator,
            job=assigned.job,
            worker=config.name,
            incarnation=assigned.incarnation,
            assignment=assigned.assignment,
            device=config.device,
            device_memory_limit=config.device_memory_limit,
            paths=config.paths,
            allow_programs=config.allow_programs,
            submitter=assigned.submitter,
            submitter_role=assigned.submitter_role,
            retry_for_s=config.retry_for_s,
            reports_fd=-1,
            tls=config.isolation.tls or (config.credentials.tls.paths if config.credentials.tls else ()),
            needs_tickets=self._membership.tokens_required,
        )

        try:  # the trainer checks it again, by the job's specification
            self._allowed_programs.check(assigned.program, assigned.submitter, assigned.submitter_role)
        except errors.ShoalError as error:
            _log.warning("program refused", job=assigned.job, program=assigned.program, reason=error.message)
            run.outbox.add_line(error.message)
            self._handle(TrainerEnded(1, TrainerOutcome(f"{error.code}: {error.message}"), False))
            return

        def on_end(exited: TrainerExit) -> None:
            self._metrics.count("log_lines_dropped", run.outbox.lines_lost)
            self._metrics.trainer_ended()
            advice = config.isolation.limits.advice(exited.status, exited.outcome.error if exited.outcome else "")
            self._events.put(TrainerEnded(exited.status, exited.outcome, run.progressed, advice))

        self._metrics.trainer_started()
        try:
            run.process = self._start_process(
                instructions,
                config.isolation,
                on_report=lambda report: self._on_report(run, report),
                on_ticket_wanted=lambda wanted: reply_to(wanted, self._client, config.name, assigned),
                on_line=run.outbox.add_line,
                on_end=on_end,
            )
        except OSError as error:
            self._metrics.trainer_ended()
            self._handle(
                TrainerEnded(1, TrainerOutcome(f"worker {config.name} cannot start a trainer: {error}"), False)
            )

    def _report_to_coordinator(self) -> None:
        """Sends waiting reports when they are due, and after the last one the end of the job.

        The end waits until the coordinator has the reports, because nobody can send them later.
        """
        run = self._job_run
        if run is None:
            return
        ended = run.end is not None or self._machine.running != run.assigned
        if not ended and self._membership.pace.report_due_s > 0:
            return
        sent = self._send_reports(run)
        match run.end:
            case None if self._machine.running != run.assigned:
                self._job_run = None  # the trainer was told to stop; its outcome is not reported
            case Renew(reason) if sent:
                self._job_run = None
                self._renew(run, reason)
            case Finish() as end if sent and self._finish(run, end):
                self._job_run = None
                self._membership.heartbeat_now()  # ask for the next assignment at once

    def _finish(self, run: _JobRun, end: Finish) -> bool:
        """Tells the coordinator that this worker has finished its job. Returns False if it must be told later."""
        try:
            run.participant.finish(
                end.error,
                shards_lost=end.shards_lost,
                trainer_failed=end.trainer_failed,
                cursor=end.cursor,
                retry_for_s=0,
            )
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            _log.debug("cannot report the end of the job yet; retrying", job=run.assigned.job, reason=error.message)
            return False
        except errors.ShoalError as error:  # fenced, or the job is gone
            _log.info("end of the job refused", job=run.assigned.job, reason=error.message)
        if end.shards_lost:
            self._log_stopped(run, end.error)
        return True

    def _log_stopped(self, run: _JobRun, error: str) -> None:
        why = why_stopped(run.assigned.job, error, lambda: run.participant.status(retry_for_s=0))
        _log.info("trainer stopped", job=run.assigned.job, reason=why)

    def _send_reports(self, run: _JobRun) -> bool:
        """Sends metrics and log lines. Returns False if some must be sent later."""
        while report := run.outbox.take():
            try:
                ack = run.participant.report(report, self._membership.pace)
            except (errors.Unreachable, errors.DeadlineExceeded):  # the trainer continues
                run.outbox.put_back(report)
                return False
            except errors.ShoalError as error:  # fenced, or the job is gone; a heartbeat brings the next assignment
                _log.info("report refused", job=run.assigned.job, reason=error.message)
                return True
            run.over = run.over or ack is ReportAck.DONE
            if run.end is None and self._machine.running == run.assigned:
                self._handle_ack(run, ack)
        return True

    def _handle_ack(self, run: _JobRun, ack: ReportAck) -> None:
        if ack is ReportAck.DONE:
            self._handle(JobOver(run.assigned))
            self._membership.heartbeat_now()  # there may be another assignment
        if ack is ReportAck.STOP_AFTER_BATCH and run.process and not run.finishing:
            run.finishing = True
            run.process.stop_after_batch()

"""Process that trains one job.

The daemon starts it and sends instructions to its standard input; the process ends when this input closes. Each job has
a process of its own for three reasons: modules are imported again, no memory or CUDA context outlives the job, and the
job can always be cancelled.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import structlog

from shoal import _tracing, errors
from shoal._numerics import takes_seed
from shoal._role.logs import configure_logging
from shoal._rpc import CoordinatorClient, TicketSource
from shoal._security import Credentials
from shoal._training.participant import Participant
from shoal.program import Program
from shoal.variables import Variable
from shoal_worker.allowed_programs import AllowedPrograms
from shoal_worker.arrays import Device, choose_device
from shoal_worker.batch_seeds import BatchSeeds
from shoal_worker.batches import Batches, LeasedBatches, NoBatches
from shoal_worker.evaluation import Evaluator
from shoal_worker.messages import (
    LEAVE,
    STOP_AFTER_BATCH,
    TICKET,
    Instructions,
    TicketReply,
    TicketWanted,
    TrainerMessage,
    TrainerOutcome,
    TrainerReport,
    encode,
)
from shoal_worker.programs import Increments, as_program_error, load_program, summed
from shoal_worker.tickets import DaemonTickets
from shoal_worker.training_loop import TrainingConfig, TrainingLoop

_log = structlog.get_logger(__name__)

# Seconds that an ending trainer has to end by itself after its daemon is gone.
_ORPHAN_GRACE_S = 1.0
# Seconds for the program's threads and exit handlers after the last message.
_EXIT_GRACE_S = 5.0

Emit = Callable[[TrainerReport | TicketWanted], None]
# Errors of servers and of the coordinator which mean that the job's shards are not on their servers.
_SHARDS_LOST = (*errors.SHARDS_LOST, errors.NotPlaced)
# Errors of a trainer that say nothing about its program: the cluster has declared this incarnation lost, or does not
# answer, or has no primary of its shards for long, or refuses calls for now, or the worker's token was revoked.
_NOT_THE_PROGRAM = (errors.Fenced, errors.Unreachable, errors.Moved, errors.Overloaded, errors.Unauthenticated)


class DaemonMessages:
    """Messages of the daemon after the instructions.

    Attributes:
        leave_requested: set by `LEAVE`.
        stop_after_batch: set by `STOP_AFTER_BATCH`.
        tickets: the replies to requests for tickets.
    """

    def __init__(self) -> None:
        self.leave_requested, self.stop_after_batch = threading.Event(), threading.Event()
        self.tickets: queue.SimpleQueue[TicketReply] = queue.SimpleQueue()
        self._rest = b""  # of an incomplete line

    def take(self, data: bytes) -> None:
        """Handles received bytes: any number of lines, perhaps incomplete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == LEAVE.rstrip():
                self.leave_requested.set()
            elif line == STOP_AFTER_BATCH.rstrip():
                self.stop_after_batch.set()
            elif line.startswith(TICKET):
                with suppress(ValueError, TypeError):  # cut off, because this process did not read its messages
                    self.tickets.put(TicketReply.from_line(line))


def main() -> None:
    """Reads the instructions, trains, reports the outcome and exits."""
    lifeline = _take_standard_input()
    ended, daemon = threading.Event(), DaemonMessages()
    line, more = read_line(lifeline)
    daemon.take(more)  # bytes that came with the first line
    instructions = Instructions.from_line(line)
    watch = threading.Thread(target=_watch_parent, args=(lifeline, ended, daemon), name="lifeline", daemon=True)
    watch.start()
    configure_logging("console", "info")
    sys.path[:0] = instructions.paths
    os.set_inheritable(instructions.reports_fd, False)
    with os.fdopen(instructions.reports_fd, "wb") as reports:
        emitting = threading.Lock()  # guards reports: other threads report steps, and request tickets

        def emit(message: TrainerMessage) -> None:
            with emitting:
                reports.write(encode(message))
                reports.flush()

        outcome = outcome_of(lambda: train(instructions, emit, daemon))
        emit(outcome)
    log_failure(outcome)
    _tracing.stop()
    ended.set()
    # Threads that the program left running must not keep the process alive.
    exit_timer = threading.Timer(_EXIT_GRACE_S, os._exit, [0])
    exit_timer.daemon = True
    exit_timer.start()


def outcome_of(run: Callable[[], TrainerOutcome]) -> TrainerOutcome:
    """Calls `run` and returns its outcome; an exception becomes an outcome too."""
    try:
        return run()
    except _NOT_THE_PROGRAM as error:
        # This incarnation ends. The job may continue elsewhere, or here, for example if the worker has another token.
        return TrainerOutcome(error.message, fenced=True)
    except errors.ShoalError as error:
        return TrainerOutcome(f"{error.code}: {error.message}", shards_lost=isinstance(error, _SHARDS_LOST))
    except Exception as error:
        _log.exception("the trainer failed")
        return TrainerOutcome(
            f"the trainer failed with {type(error).__name__}: {error}; the job's log has the traceback"
        )


def log_failure(outcome: TrainerOutcome) -> None:
    """Writes the job's error, with the program's traceback, to the job's log.

    It writes to file descriptor 2, because the program may have replaced or closed `sys.stderr`.
    """
    if outcome.error and not outcome.fenced:
        with suppress(OSError), open(2, "w", errors="replace", closefd=False) as log:
            log.write(f"{outcome.error}\n")


def train(instructions: Instructions, emit: Emit, daemon: DaemonMessages) -> TrainerOutcome:
    """Returns the outcome of training one job, from its description to its end.

    Args:
        instructions: the daemon's instructions.
        emit: called with each report, and with each request for a ticket.
        daemon: later messages of the daemon.

    Raises:
        ShoalError: the error that ended the training.
    """
    leave_requested = daemon.leave_requested
    _tracing.start("worker", instructions.worker)
    device = choose_device(instructions.device, instructions.device_memory_limit)
    device.activate()
    coordinator = _client(instructions, emit, daemon)
    try:
        participant = Participant(
            coordinator, instructions.job, instructions.worker, instructions.incarnation, instructions.assignment
        )
        name = participant.spec.program
        _check_allowed(name, instructions)
        program = load_program(name, participant.spec.settings)
        variables, samples = variables_of(name, program, device), _samples_of(name, program)
        participant.describe(summed(variables, participant.spec.consistency), samples)
        batches = _batches(name, program, participant, device)
        evaluator = _evaluator(name, program, participant, device, leave_requested)
        try:
            with _tracing.root("enter", job=instructions.job, worker=instructions.worker):
                parameters = participant.enter(stop=leave_requested.is_set, upload=device.upload)
        except (errors.Cancelled, errors.JobFailed) as error:  # the job has ended; its reason is known elsewhere
            _log.info("job ended before this worker entered", reason=error.message)
            return TrainerOutcome(left=leave_requested.is_set())
        with parameters, closing(batches):
            spec = participant.spec
            config = TrainingConfig(
                name=name,
                program=program,
                device=device,
                max_steps=spec.max_steps,
                seeds=BatchSeeds(spec.seed, participant.rank) if takes_seed(program.loss_and_gradients) else None,
                evaluator=evaluator,
                increments=Increments(variables, parameters.variables, spec.workers),
                wire_dtype=None if spec.wire_dtype == "float32" else np.dtype(spec.wire_dtype),
            )
            training = TrainingLoop(
                config,
                parameters,
                batches,
                emit=lambda report: emit(replace(report, retries=coordinator.retries.take())),
                traces=parameters.traces,
                stop=leave_requested,
                stop_after_batch=daemon.stop_after_batch,
            )
            return TrainerOutcome(left=not training.run(), cursor=batches.cursor)
    finally:
        coordinator.close()


def _check_allowed(program: str, instructions: Instructions) -> None:
    """Raises ProgramNotAllowed or ProgramError if this worker does not allow a program to the job's submitter."""
    allowed = AllowedPrograms(instructions.paths, instructions.allow_programs)
    allowed.check(program, instructions.submitter, instructions.submitter_role)


def _client(instructions: Instructions, emit: Emit, daemon: DaemonMessages) -> CoordinatorClient:
    """Returns a client that presents the certificate for trainers, and tickets for this trainer's part in its job."""
    credentials = Credentials.find(*instructions.tls, environment={})
    if instructions.needs_tickets:
        fetch = DaemonTickets(emit, daemon.tickets, instructions.retry_for_s)
        credentials = TicketSource(fetch, credentials).credentials
    return CoordinatorClient(
        instructions.coordinator,
        retry_for_s=instructions.retry_for_s,
        credentials=credentials,
        on_silence=_log.warning,
    )


def variables_of(name: str, program: Program, device: Device) -> Mapping[str, Variable | np.ndarray]:
    """Returns the program's variables, with arrays copied to the host.

    Args:
        name: the program's name, for messages.
        program: the program.
        device: the device that holds the arrays.

    Raises:
        ProgramError: `variables()` raises, or does not return variables or arrays by name.
    """
    with as_program_error(f"program {name}: variables()"):
        given: object = program.variables()
        if not isinstance(given, Mapping) or not given:
            raise errors.ProgramError(
                f"program {name}: variables() returned {type(given).__name__}; "
                "return a mapping of names to at least one shoal.Variable or array"
            )
        for key, value in given.items():
            if not isinstance(value, Variable) and not hasattr(value, "dtype"):
                raise errors.ProgramError(
                    f"program {name}: variables()[{key!r}] is a {type(value).__name__}; "
                    "give a shoal.Variable or an array"
                )
        return {key: value if isinstance(value, Variable) else device.to_host(value) for key, value in given.items()}


def _samples_of(name: str, program: Program) -> int:
    with as_program_error(f"program {name}: len(dataset)"):
        return 0 if program.dataset is None else len(program.dataset)


def _batches(name: str, program: Program, participant: Participant, device: Device) -> Batches:
    spec, dataset = participant.spec, program.dataset
    if dataset is not None and len(dataset):
        with as_program_error(f"program {name}: `dataset`"):
            return LeasedBatches(dataset, spec.batch_size, spec.seed, participant.lease, prepare=device.activate)
    if not spec.max_steps:
        raise errors.InvalidJob(
            f"job {spec.name}: program {spec.program} has no samples, so the job would never end; set "
            "max_steps (on the command line: --max-steps)"
        )
    return NoBatches()


def _evaluator(
    name: str, program: Program, participant: Participant, device: Device, leave_requested: threading.Event
) -> Evaluator | None:
    spec = participant.spec
    if spec.evaluation is None:
        return None
    return Evaluator(
        name,
        program,
        device,
        participant,
        policy=spec.evaluation,
        batch_size=spec.batch_size,
        stop=leave_requested,
    )


def _take_standard_input() -> int:
    """Moves standard input to another descriptor, so that the program cannot read the daemon's messages."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def read_line(descriptor: int) -> tuple[bytes, bytes]:
    """Returns the first line and the bytes read after it."""
    read = b""
    while b"\n" not in read:
        piece = os.read(descriptor, 65_536)
        if not piece:
            raise SystemExit("standard input has no complete instructions; only a worker daemon can start a trainer")
        read += piece
    line, _, more = read.partition(b"\n")
    return line, more


def _watch_parent(lifeline: int, ended: threading.Event, daemon: DaemonMessages) -> None:
    """Reads the daemon's messages. When the pipe closes, ends this process and all that its program started."""
    while data := os.read(lifeline, 4096):
        daemon.take(data)
    ended.wait(_ORPHAN_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

"""The process that trains one job: started by the daemon, told what to do on standard input, gone when that closes.

A process a job means fresh imports, no memory or CUDA context that outlives the job, and a cancel that always works.
"""

import os
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
from shoal._role.lifecycle import configure_logging
from shoal._rpc import CoordinatorClient
from shoal._training.participant import Participant
from shoal.program import Program
from shoal.variables import Variable
from shoal_worker.arrays import Device, choose_device
from shoal_worker.batch_seeds import BatchSeeds
from shoal_worker.batches import Batches, LeasedBatches, NoBatches
from shoal_worker.evaluation import Evaluator
from shoal_worker.messages import ENOUGH, LEAVE, Instructions, TrainerOutcome, TrainerReport, encode
from shoal_worker.programs import as_program_error, load_program
from shoal_worker.training_loop import TrainingConfig, TrainingLoop

_log = structlog.get_logger(__name__)

# After its daemon is gone, time for a trainer that is just ending to end by itself.
_ORPHAN_GRACE_S = 1.0
# After its last word, time for the program's threads and exit handlers.
_EXIT_GRACE_S = 5.0

Emit = Callable[[TrainerReport], None]
# What servers say, and the coordinator, where the job's shards are not (any more).
_LOST = (*errors.SHARDS_LOST, errors.NotPlaced)


class DaemonMessages:
    """What the daemon has said since it gave the instructions.

    Attributes:
        leaving: set by `LEAVE`.
        enough: set by `ENOUGH`.
    """

    def __init__(self) -> None:
        self.leaving, self.enough = threading.Event(), threading.Event()
        self._rest = b""  # of a line

    def take(self, data: bytes) -> None:
        """Takes what came, which may be more than one line, or less."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == LEAVE.rstrip():
                self.leaving.set()
            elif line == ENOUGH.rstrip():
                self.enough.set()


def main() -> None:
    """Reads its instructions, trains, says how it ended, and leaves."""
    lifeline = _take_standard_input()
    ended, words = threading.Event(), DaemonMessages()
    line, more = _read_line(lifeline)
    words.take(more)  # if some came at once
    instructions = Instructions.from_line(line)
    watch = threading.Thread(target=_watch_parent, args=(lifeline, ended, words), name="lifeline", daemon=True)
    watch.start()
    configure_logging("console", "info")
    sys.path[:0] = instructions.paths
    os.set_inheritable(instructions.reports_fd, False)
    with os.fdopen(instructions.reports_fd, "wb") as upwards:

        def emit(message: TrainerReport | TrainerOutcome) -> None:
            upwards.write(encode(message))
            upwards.flush()

        outcome = outcome_of(lambda: train(instructions, emit, words))
        emit(outcome)
    log_failure(outcome)
    _tracing.stop()
    ended.set()
    # Threads that the program left running must not keep a finished trainer for long.
    last_call = threading.Timer(_EXIT_GRACE_S, os._exit, [0])
    last_call.daemon = True
    last_call.start()


def outcome_of(run: Callable[[], TrainerOutcome]) -> TrainerOutcome:
    """Runs, and says how that ended, if it raises, too."""
    try:
        return run()
    except (errors.Fenced, errors.Unreachable) as error:  # this life ends; the job does not, for others may go on
        return TrainerOutcome(error.message, fenced=True)
    except errors.ShoalError as error:
        return TrainerOutcome(f"{error.code}: {error.message}", lost=isinstance(error, _LOST))
    except Exception as error:
        _log.exception("a defect of the trainer")
        return TrainerOutcome(
            f"the trainer failed with {type(error).__name__}: {error}; the job's log has the traceback"
        )


def log_failure(outcome: TrainerOutcome) -> None:
    """Writes what the job fails with, the program's traceback in it, where its output goes: the job's log.

    Not by `sys.stderr`, which is the program's to replace or close.
    """
    if outcome.error and not outcome.fenced:
        with suppress(OSError), open(2, "w", errors="replace", closefd=False) as log:
            log.write(f"{outcome.error}\n")


def train(instructions: Instructions, emit: Emit, words: DaemonMessages) -> TrainerOutcome:
    """Trains one job from its description to its end.

    Args:
        instructions: of the daemon.
        emit: is given the figures.
        words: of the daemon, to end after the step in progress.

    Raises:
        ShoalError: what stopped it.
    """
    leaving = words.leaving
    _tracing.start("worker", instructions.worker)
    device = choose_device(instructions.device, instructions.device_memory_limit)
    device.activate()
    coordinator = CoordinatorClient(instructions.coordinator, retry_for_s=instructions.retry_for_s)
    try:
        participant = Participant(
            coordinator,
            instructions.job,
            instructions.worker,
            instructions.incarnation,
            instructions.assignment,
        )
        name = participant.spec.program
        program = load_program(name, participant.spec.settings)
        samples = _samples_of(name, program)
        participant.describe(variables_of(name, program, device), samples)
        batches = _batches(name, program, participant, device)
        evaluator = _evaluator(name, program, participant, device, leaving)
        try:
            with _tracing.root("enter", job=instructions.job, worker=instructions.worker):
                parameters = participant.enter(stop=leaving.is_set, upload=device.bring)
        except (errors.Cancelled, errors.JobFailed) as error:  # whoever ended the job knows why
            _log.info("not taking part", reason=error.message)
            return TrainerOutcome(left=leaving.is_set())
        with parameters, closing(batches):
            spec = participant.spec
            config = TrainingConfig(
                name=name,
                program=program,
                device=device,
                max_steps=spec.max_steps,
                draws=BatchSeeds(spec.seed, participant.rank) if takes_seed(program.loss_and_gradients) else None,
                evaluator=evaluator,
                wire=None if spec.wire == "float32" else np.dtype(spec.wire),
            )
            training = TrainingLoop(
                config,
                parameters,
                batches,
                emit=lambda figures: emit(replace(figures, retries=coordinator.retries.take())),
                traces=parameters.traces,
                stop=leaving,
                enough=words.enough,
            )
            return TrainerOutcome() if training.run() else TrainerOutcome(left=True, cursor=batches.cursor)
    finally:
        coordinator.close()


def variables_of(name: str, program: Program, device: Device) -> Mapping[str, Variable | np.ndarray]:
    """The program's variables, arrays among them on the host.

    Raises:
        ProgramError: `variables` raises, or returns something else.
    """
    with as_program_error(f"program {name}: variables()"):
        given: object = program.variables()
        if not isinstance(given, Mapping) or not given:
            raise errors.ProgramError(
                f"program {name}: variables() returned {type(given).__name__}; "
                "return one shoal.Variable or array at least, by name"
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
            f"job {spec.name}: program {spec.program} has no samples, so nothing says when it ends; set max_steps"
        )
    return NoBatches()


def _evaluator(
    name: str, program: Program, participant: Participant, device: Device, leaving: threading.Event
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
        stop=leaving,
    )


def _take_standard_input() -> int:
    """Keeps standard input for itself: a program that reads from it gets nothing, and cannot eat the instructions."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def _read_line(descriptor: int) -> tuple[bytes, bytes]:
    """The first line, and what came with it."""
    read = b""
    while b"\n" not in read:
        piece = os.read(descriptor, 65_536)
        if not piece:
            raise SystemExit("standard input ended before the instructions did; the worker daemon starts trainers")
        read += piece
    line, _, more = read.partition(b"\n")
    return line, more


def _watch_parent(lifeline: int, ended: threading.Event, words: DaemonMessages) -> None:
    """Hears what the daemon says; ends this process, and all that its program started, at the end."""
    while said := os.read(lifeline, 4096):
        words.take(said)
    ended.wait(_ORPHAN_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

"""A program's held-out samples, evaluated when it is this worker's turn."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any, Protocol

from shoal import errors
from shoal._wire import EvaluationAck, EvaluationClaim
from shoal.evaluation import MetricTotals, batches_of
from shoal.evaluation_policy import EvaluationPolicy
from shoal.program import Array, EvaluatedProgram, Program
from shoal.status import Evaluation
from shoal_worker.batches import ahead_of
from shoal_worker.devices import Device
from shoal_worker.programs import computing_on, told

# How long to hold still for the checkpoint of what was evaluated, and how often to ask: at first, and at the most.
_CUT_WITHIN_S = 10.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.25


class EvaluationClient(Protocol):
    """What it needs of `Participant`."""

    def claim_evaluation(self, step: int, *, through: bool = False) -> EvaluationClaim:
        """Whether an evaluation is this worker's to do."""
        ...

    def report_evaluation(self, result: Evaluation) -> EvaluationAck:
        """Says what it has found, perhaps once more."""
        ...


class Evaluator:
    """Evaluates for one worker of one job.

    While it does, the worker takes no step. In a synchronous job the others wait for it; so the variables stay what was
    evaluated until the coordinator has begun the checkpoint of them.

    Args:
        name: of the program, for messages.
        program: what to evaluate.
        device: where; active on this thread.
        turns: the way to the coordinator.
        policy: how often to ask, and what one of the figures has to be.
        batch_size: samples.
        stop: set to leave off.
        clock: seconds, from any start.

    Raises:
        ProgramError: the program has nothing to evaluate.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        device: Device,
        turns: EvaluationClient,
        *,
        policy: EvaluationPolicy,
        batch_size: int,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._program = _checked(name, program)
        self._device = device
        self._turns = turns
        self._policy = policy
        self._batch_size = batch_size
        self._stop = stop
        self._clock = clock
        self._asked_at = 0  # the last step that it asked for, or began at
        self._untried = True

    @property
    def untried(self) -> bool:
        """Whether `check_program` is still to come."""
        return self._untried

    def check_program(self, step: int, params: Mapping[str, Array]) -> None:
        """Evaluates one batch and forgets what it finds: what is wrong shows now, and not when all is trained.

        Args:
            step: its own, the first one.
            params: the variables as they were pulled for it, on the device.

        Raises:
            ProgramError: the samples cannot be read or evaluated, or none of the figures is the job's metric.
        """
        self._untried = False
        found = self._evaluated(params, step, most=1)
        if found and (lack := self._policy.missing_metric(found[0])):
            raise errors.ProgramError(f"program {self._name}: evaluate {lack}")

    def due(self, step: int) -> bool:
        """Whether to ask at this step."""
        every = self._policy.every_steps
        return every > 0 and step // every > self._asked_at // every

    def at_step(self, step: int, params: Mapping[str, Array]) -> bool:
        """Evaluates if it is this worker's turn.

        Args:
            step: its own.
            params: the variables as they were pulled for it, on the device.

        Returns:
            Whether the job goes on; False: it ends early.
        """
        self._asked_at = step
        turn = self._turns.claim_evaluation(step)
        return not (self._take(turn.number, step, params) if turn.number else turn.stop)

    def at_end(self, step: int, pull: Callable[[], Mapping[str, Array]]) -> None:
        """Evaluates once this worker is through, if it is the last.

        Args:
            step: its own.
            pull: gives the variables as they are in the end, on the device.
        """
        turn = self._turns.claim_evaluation(step, through=True)
        if turn.number:
            self._take(turn.number, step, pull())

    def _take(self, number: int, step: int, params: Mapping[str, Array]) -> bool:
        """Evaluates, and says what it found; whether the job ends early for it."""
        start = self._clock()
        found = self._evaluated(params, step)
        if found is None:
            return False
        figures, samples = found
        result = Evaluation(number, step, figures, samples, self._clock() - start)
        deadline, delay = self._clock() + _CUT_WITHIN_S, _FIRST_POLL_S
        while (verdict := self._turns.report_evaluation(result)).wait:
            if self._clock() > deadline or self._stop.wait(delay):
                break
            delay = min(2 * delay, _LONGEST_POLL_S)
        return verdict.stop

    def _evaluated(
        self, params: Mapping[str, Array], step: int, most: int | None = None
    ) -> tuple[dict[str, float], int] | None:
        """The figures, and of how many samples; None: this worker is to leave.

        Args:
            params: the variables.
            step: for messages.
            most: so many batches at most; None: all.
        """
        program, device, total = self._program, self._device, MetricTotals()
        with self._blamed("held_out", step):
            plan = batches_of(program, self._batch_size)[:most]
        with closing(ahead_of(program.held_out, plan, prepare=device.activate)) as batches:
            for numbers in plan:
                if self._stop.is_set():
                    return None
                with self._blamed("held_out.batch", step):
                    batch = device.put(next(batches))
                with self._blamed("evaluate", step):
                    total.add(program.evaluate(params, batch), len(numbers))
        with self._blamed("evaluate", step):
            return total.metrics(), total.samples

    def _blamed(self, what: str, step: int) -> AbstractContextManager[None]:
        return told(f"program {self._name}: {what}, step {step},", computing_on(self._device, self._batch_size))


def _checked(name: str, program: Any) -> EvaluatedProgram:
    if not isinstance(program, EvaluatedProgram):
        raise errors.ProgramError(
            f"program {name} has no `held_out` or no method evaluate(), and its job asks for evaluation; see "
            "shoal.program.EvaluatedProgram"
        )
    return program


__all__ = ["EvaluationClient", "Evaluator"]

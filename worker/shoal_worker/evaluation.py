"""Evaluation of a program on its held-out samples, when the coordinator assigns one to this worker."""

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
from shoal_worker.programs import as_program_or_memory_error, computing_on

# Longest wait for the checkpoint of the evaluated values, and the first and longest polling interval.
_CUT_WITHIN_S = 10.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.25


class EvaluationClient(Protocol):
    """The methods of `Participant` that an evaluator uses."""

    def claim_evaluation(self, step: int, *, finished_training: bool = False) -> EvaluationClaim:
        """Asks whether this worker is to evaluate at this step."""
        ...

    def report_evaluation(self, result: Evaluation) -> EvaluationAck:
        """Reports a result. A repeated report is safe."""
        ...


class Evaluator:
    """Evaluator of one worker in one job.

    The worker takes no step while it evaluates. In a synchronous job the other workers wait for it, so the evaluated
    values do not change until the coordinator has begun their checkpoint.

    Args:
        name: the program's name, for messages.
        program: the program to evaluate.
        device: the device to compute on; active on this thread.
        client: client of the coordinator.
        policy: the interval of evaluations, and the metric that they must contain.
        batch_size: samples of a batch.
        stop: set to abandon an evaluation.
        clock: returns seconds from any origin.

    Raises:
        ProgramError: the program has no held-out samples.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        device: Device,
        client: EvaluationClient,
        *,
        policy: EvaluationPolicy,
        batch_size: int,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._program = _checked(name, program)
        self._device = device
        self._client = client
        self._policy = policy
        self._batch_size = batch_size
        self._stop = stop
        self._clock = clock
        self._claimed_at = 0  # the last step at which it asked
        self._unchecked = True

    @property
    def unchecked(self) -> bool:
        """Returns whether `check_program` has not run yet."""
        return self._unchecked

    def check_program(self, step: int, params: Mapping[str, Array]) -> None:
        """Evaluates one batch and discards the result, so that errors show before the training.

        Args:
            step: the worker's first step.
            params: the variables pulled for it, on the device.

        Raises:
            ProgramError: the samples cannot be read or evaluated, or the job's metric is missing.
        """
        self._unchecked = False
        found = self._evaluated(params, step, max_batches=1)
        if found and (missing := self._policy.missing_metric(found[0])):
            raise errors.ProgramError(f"program {self._name}: evaluate {missing}")

    def due(self, step: int) -> bool:
        """Returns whether to ask the coordinator at this step."""
        every = self._policy.every_steps
        return every > 0 and step // every > self._claimed_at // every

    def at_step(self, step: int, params: Mapping[str, Array]) -> bool:
        """Evaluates if the coordinator gives the evaluation to this worker.

        Args:
            step: the worker's step.
            params: the variables pulled for it, on the device.

        Returns:
            Whether the job continues; False if it ends early.
        """
        self._claimed_at = step
        claim = self._client.claim_evaluation(step)
        return not (self._run_claimed(claim.number, step, params) if claim.number else claim.stop)

    def at_end(self, step: int, pull: Callable[[], Mapping[str, Array]]) -> None:
        """Evaluates after the last step, if this worker is the last one to finish.

        Args:
            step: the worker's step.
            pull: returns the final variables, on the device.
        """
        claim = self._client.claim_evaluation(step, finished_training=True)
        if claim.number:
            self._run_claimed(claim.number, step, pull())

    def _run_claimed(self, number: int, step: int, params: Mapping[str, Array]) -> bool:
        """Evaluates and reports the result. Returns whether the job ends early."""
        start = self._clock()
        found = self._evaluated(params, step)
        if found is None:
            return False
        metrics, samples = found
        result = Evaluation(number, step, metrics, samples, self._clock() - start)
        deadline, delay = self._clock() + _CUT_WITHIN_S, _FIRST_POLL_S
        while (ack := self._client.report_evaluation(result)).wait:
            if self._clock() > deadline or self._stop.wait(delay):
                break
            delay = min(2 * delay, _LONGEST_POLL_S)
        return ack.stop

    def _evaluated(
        self, params: Mapping[str, Array], step: int, max_batches: int | None = None
    ) -> tuple[dict[str, float], int] | None:
        """Returns the metrics and the number of samples; None if `stop` was set.

        Args:
            params: the variables, on the device.
            step: the worker's step, for messages.
            max_batches: largest number of batches to evaluate; None means all.
        """
        program, device, total = self._program, self._device, MetricTotals()
        with self._errors_named("held_out", step):
            plan = batches_of(program, self._batch_size)[:max_batches]
        with closing(ahead_of(program.held_out, plan, prepare=device.activate)) as batches:
            for numbers in plan:
                if self._stop.is_set():
                    return None
                with self._errors_named("held_out.batch", step):
                    batch = device.put(next(batches))
                with self._errors_named("evaluate", step):
                    total.add(program.evaluate(params, batch), len(numbers))
        with self._errors_named("evaluate", step):
            return total.metrics(), total.samples

    def _errors_named(self, what: str, step: int) -> AbstractContextManager[None]:
        return as_program_or_memory_error(
            f"program {self._name}: {what}, step {step},", computing_on(self._device, self._batch_size)
        )


def _checked(name: str, program: Any) -> EvaluatedProgram:
    if not isinstance(program, EvaluatedProgram):
        raise errors.ProgramError(
            f"program {name} lacks `held_out` or the method evaluate(), which its job's evaluation needs; see "
            "shoal.program.EvaluatedProgram"
        )
    return program


__all__ = ["EvaluationClient", "Evaluator"]

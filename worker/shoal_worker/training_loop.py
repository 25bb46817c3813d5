"""Training loop of a worker: lease, pull, compute, push, report. Its `Parameters` and `Batches` objects do the I/O."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from shoal import _tracing, errors
from shoal._training import Gradients, PushResult, Report
from shoal._wire import Cursor, NoRange, number
from shoal.program import Array, Program, StepOutput
from shoal_worker.batch_seeds import BatchSeeds
from shoal_worker.batches import Batch, Batches
from shoal_worker.devices import Device
from shoal_worker.evaluation import Evaluator
from shoal_worker.messages import TrainerReport
from shoal_worker.programs import Increments, as_out_of_memory_error, as_program_or_memory_error, computing_on
from shoal_worker.step_counters import StepCounters

_REPORT_EVERY_S = 0.5
# Shortest round without data: short enough not to delay other workers, long enough not to flood the coordinator.
_IDLE_ROUND_S = 0.02
# After more gradients in a row with NaN or Inf, the job fails.
_MAX_REJECTED_IN_A_ROW = 10


class Parameters(Protocol):
    """The methods of `Pipeline` that the loop uses."""

    @property
    def step(self) -> int:
        """The next step."""
        ...

    def pull(self) -> dict[str, np.ndarray]:
        """Waits until the consistency mode admits this step and returns the variables, perhaps uploaded already."""
        ...

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None,
    ) -> PushResult:
        """Pushes this step's gradients and advances the step.

        Args:
            gradients: by name, or one after the other.
            updates: new values of variables that are not trained; None if there are none.
            weight: weight of the gradients in the step's mean.
            cursor: the position in the leased range after this batch; None if no data is leased.

        Returns:
            The result. If its outcome is "sent", `settle` returns the servers' answer.
        """
        ...

    def settle(self) -> PushResult | None:
        """Waits for the answer to a sent push; returns None if there is none."""
        ...

    def skip(self) -> PushResult:
        """Skips this step, so that no worker waits for it."""
        ...

    def barrier(self) -> None:
        """Waits as `pull` does, without fetching values."""
        ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """Result of a step on the host. The gradients may be an iterator over arrays that are still computed."""

    gradients: Gradients
    updates: dict[str, np.ndarray] | None
    values: dict[str, float]  # loss and metrics


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a worker's training.

    Attributes:
        name: the program's name, for messages.
        program: the program to train.
        device: the device to compute on; active on the training thread.
        max_steps: the step to stop at; 0 means no limit.
        seeds: seeds of the batches; None if the program takes no seed.
        evaluator: runs evaluations; None if the job has none.
        wire_dtype: 16-bit dtype in which float32 gradients travel; None means unchanged.
        increments: turns updates of averaged variables into increments; None leaves updates as they are.
    """

    name: str
    program: Program
    device: Device
    max_steps: int
    seeds: BatchSeeds | None = None
    evaluator: Evaluator | None = None
    wire_dtype: np.dtype | None = None
    increments: Increments | None = None


class TrainingLoop:
    """Training loop of one worker in one job.

    **A worker without data must not delay the others.** The coordinator answers WAIT while other workers hold the last
    ranges. The worker must stay, because it gets the range of a worker that is lost. But its step must advance: a
    synchronous step waits for every worker, and bounded staleness limits the distance to the slowest worker. So an
    idle worker keeps stepping. At each step it waits at the barrier, asks for data and, without data, skips the step.
    A skipped step has no weight in the step's mean.

    - Synchronous: the barrier opens when the others have pushed, so the idle worker keeps their pace.
    - Bounded staleness: the idle worker runs ahead up to the bound. Then the barrier holds it until the slowest moves.
    - Asynchronous: the barrier never waits, so a pause sets the pace: a round without data lasts at least
      `_IDLE_ROUND_S`. The pause follows the skip. In the other modes it therefore delays only steps that are shorter
      than the pause.

    The loop does not depend on the mode. The barrier transfers no values, so an idle worker uses no bandwidth.

    **The lease follows the barrier.** The ranges leased at a synchronous step then depend only on the step. Its
    combined batch is the same in each run, whichever worker gets which part.

    Args:
        config: settings of the training.
        parameters: source of values, and target of gradients.
        batches: source of batches.
        emit: called with a report about every half second, and once at the end, also after an error. It must not block.
            Another thread calls it during a long wait.
        traces: traces of this worker's steps, shared with `parameters`.
        clock: returns seconds from any origin.
        now: returns seconds of Unix time.
        stop: set to end the loop after the current step.
        stop_after_batch: set to finish the job after the current step.

    Raises:
        ProgramError: from `run`: the program raised, or too many gradients in a row had NaN or Inf.
        InvalidGradient: from `run`: a gradient's name, shape or dtype does not match the variables.
    """

    def __init__(
        self,
        config: TrainingConfig,
        parameters: Parameters,
        batches: Batches,
        *,
        emit: Callable[[TrainerReport], None],
        traces: _tracing.Traces | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        stop: threading.Event | None = None,
        stop_after_batch: threading.Event | None = None,
    ) -> None:
        self._config, self._device = config, config.device
        self._parameters = parameters
        self._batches = batches
        self._emit = emit
        self._traces = traces or _tracing.Traces("step")
        self._clock = clock
        self._stop, self._stop_after_batch = stop or threading.Event(), stop_after_batch or threading.Event()
        self._counters = StepCounters(clock, now)
        self._rejected_in_a_row = 0
        self._computing_s = 0.0  # seconds of computation during the push of the step's first gradients
        self._sent: tuple[int, dict[str, float]] = (0, {})  # samples and metrics of the push in progress

    def run(self) -> bool:
        """Trains until all data is done, `max_steps` is reached, or `stop` is set.

        Returns:
            Whether nothing is left to do. In both cases, the updates of all samples up to `batches.cursor` are applied.
        """
        ended = threading.Event()
        reporter = threading.Thread(target=self._report_steps, args=(ended,), name="steps", daemon=True)
        reporter.start()
        try:
            finished = self._at_last_step()
            while not finished and not self._stop.is_set():
                finished = self._stop_after_batch.is_set() or not self._advance() or self._at_last_step()
                if self._counters.age_s >= _REPORT_EVERY_S:
                    self._emit(self._report())
            self._settle()
            if self._batches.cursor or not finished:
                # The step of the last push may still be open. After the barrier it is closed, so every checkpoint
                # includes the samples that the ledger counts as done.
                self._parameters.barrier()
            if finished:
                self._evaluate_at_end()
            return finished
        finally:
            ended.set()
            reporter.join()
            self._emit(self._report())

    def _report_steps(self, ended: threading.Event) -> None:
        """Reports the step while a step takes long. A worker that waits for a hung one must not look like that one."""
        reported = 0
        while not ended.wait(_REPORT_EVERY_S):
            step = self._parameters.step
            if step != reported and self._counters.age_s >= _REPORT_EVERY_S:
                self._emit(TrainerReport(Report(step), {}))
                reported = step

    def _report(self) -> TrainerReport:
        return replace(self._counters.take(self._parameters.step), device_memory=self._device.memory())

    def _at_last_step(self) -> bool:
        return 0 < self._config.max_steps <= self._parameters.step

    def _advance(self) -> bool:
        """Trains on a batch, leases batches, or skips a step. Returns False when nothing is left to do."""
        if self._batches.has_next:
            return self._train()
        start = self._clock()
        with self._counters.timed("wait"), self._span("wait"):
            self._settle()
            self._parameters.barrier()
            lease_answer, step = self._batches.lease(), self._parameters.step
            if lease_answer is NoRange.WAIT:
                self._parameters.skip()
                self._stop.wait(max(0.0, start + _IDLE_ROUND_S - self._clock()))
        if lease_answer is NoRange.WAIT:
            self._counters.stepped(step)
        return lease_answer is not NoRange.FINISHED

    def _train(self) -> bool:
        """Trains on a batch. Returns False if the job ends before its data is done."""
        with (
            self._counters.timed("pull"),
            as_out_of_memory_error(
                f"{self._program_name}: the pull for step {self._parameters.step}", self._device_and_batch
            ),
        ):
            params = self._pull()
        if not self._evaluate(params):
            return False
        step = self._parameters.step
        self._train_on(params)
        self._counters.stepped(step)
        return True

    def _pull(self) -> dict[str, Array]:
        """Returns the variables for this step, on the device."""
        return self._device.receive(self._parameters.pull())

    def _evaluate(self, params: Mapping[str, Array]) -> bool:
        """Evaluates if it is due, and checks the program at the first step. Returns False if the job ends early."""
        evaluator, step = self._config.evaluator, self._parameters.step
        if evaluator is None:
            return True
        if evaluator.unchecked:
            with self._counters.timed("evaluate"), self._span("evaluate"):
                evaluator.check_program(step, params)
        if not evaluator.due(step):
            return True
        with self._counters.timed("evaluate"), self._span("evaluate"):
            return evaluator.at_step(step, params)

    def _evaluate_at_end(self) -> None:
        if self._config.evaluator is None:
            return
        with self._counters.timed("evaluate"), self._span("evaluate"):
            self._parameters.barrier()  # values that were pulled ahead lack the last push
            self._config.evaluator.at_end(self._parameters.step, self._pull)

    def _train_on(self, params: Mapping[str, Array]) -> None:
        with self._counters.timed("read"), self._span("read"), self._errors_named("dataset.batch"):
            batch = self._batches.take()
        with self._counters.timed("compute"), self._span("compute", samples=batch.samples):
            computed = self._compute(params, batch)
        self._computing_s = 0.0
        try:
            with self._counters.timed("push", but=lambda: self._computing_s):
                result = self._push(computed, batch)
        finally:
            if self._computing_s:
                self._counters.observe("compute", self._computing_s)
        if result is None:
            return
        self._sent = batch.samples, computed.values
        if result.outcome != "sent":
            self._count(result)

    def _push(self, computed: _Computed, batch: Batch) -> PushResult | None:
        """Pushes a step's result. Returns None if it had NaN or Inf; the step is then skipped."""
        self._settle()
        try:
            return self._parameters.push(
                computed.gradients, updates=computed.updates, weight=batch.samples or 1.0, cursor=batch.cursor
            )
        except errors.NonFiniteGradient as error:
            self._reject(error)
            self._parameters.skip()  # other workers may wait for this step
            return None

    def _settle(self) -> None:
        """Waits for the previous push, if it is still in progress."""
        try:
            result = self._parameters.settle()
        except errors.NonFiniteGradient as error:
            self._reject(error)  # the pipeline has skipped its step
            return
        if result:
            self._count(result)

    def _count(self, result: PushResult) -> None:
        self._rejected_in_a_row = 0
        self._counters.pushed(result, *self._sent)

    def _compute(self, params: Mapping[str, Array], given: Batch) -> _Computed:
        program, device = self._config.program, self._device
        with self._errors_named("dataset.batch"):
            batch = device.put(given.data)
        with self._errors_named("loss_and_gradients"):
            step = self._checked(program.loss_and_gradients(params, batch, **self._seeded(given)))
            where = f"{self._program_name}: loss_and_gradients, step {self._parameters.step}, gives"
            metrics = {name: number(value, f"{where} the metric {name!r}") for name, value in step.metrics.items()}
            gradients, increments = step.gradients, self._config.increments
            updates = increments.of(step.updates, params) if increments else step.updates
            return _Computed(
                gradients=dict(device.download(gradients.items(), self._config.wire_dtype))
                if isinstance(gradients, Mapping)
                else self._one_by_one(gradients),
                updates=dict(device.download(updates.items())) or None,
                values={**metrics, "loss": number(step.loss, f"{where} the loss")},
            )

    def _seeded(self, batch: Batch) -> dict[str, int]:
        seeds = self._config.seeds
        return {} if seeds is None else {"seed": seeds.seed(batch.place, self._parameters.step)}

    def _checked(self, result: object) -> StepOutput:
        match result:
            case StepOutput():
                return result
            case (loss, (Mapping() | Iterator() | list() | tuple()) as gradients):
                return StepOutput(loss, gradients)
        raise errors.ProgramError(
            f"program {self._config.name}: loss_and_gradients returned a {type(result).__name__}; "
            "return (loss, gradients by name) or a shoal.StepOutput"
        )

    def _one_by_one(self, gradients: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields gradients as the program computes them, while earlier ones are pushed."""
        with self._errors_named("loss_and_gradients"):
            arrays = self._device.download(iter(gradients), self._config.wire_dtype)
        with closing(arrays):
            while True:
                start = self._clock()
                with self._errors_named("loss_and_gradients"):
                    following = next(arrays, None)
                self._computing_s += self._clock() - start
                if following is None:
                    return
                yield following

    def _reject(self, error: errors.NonFiniteGradient) -> None:
        """Counts a rejected gradient. Raises ProgramError after too many in a row."""
        self._counters.rejected()
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row > _MAX_REJECTED_IN_A_ROW:
            raise errors.ProgramError(
                f"program {self._config.name}: {self._rejected_in_a_row} gradients in a row had NaN or Inf, "
                f"the last one at step {self._parameters.step} ({error.message}); none of them was applied. "
                "Try a lower learning rate, or check the data"
            ) from None

    def _span(self, phase: str, **attributes: object) -> _tracing.Span:
        return self._traces.span(self._parameters.step, phase, **attributes)

    def _errors_named(self, what: str) -> AbstractContextManager[None]:
        return as_program_or_memory_error(
            f"{self._program_name}: {what}, step {self._parameters.step},", self._device_and_batch
        )

    @property
    def _program_name(self) -> str:
        return f"program {self._config.name}"

    @property
    def _device_and_batch(self) -> str:
        return computing_on(self._device, self._batches.batch_size)


__all__ = ["Parameters", "TrainingLoop"]

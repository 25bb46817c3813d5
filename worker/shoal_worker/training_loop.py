"""The loop that trains: lease, pull, compute, push, report. It owns the order of things and no way to any server."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from shoal import _tracing, errors
from shoal._training import Gradients, PushResult
from shoal._wire import Cursor, NoRange, number
from shoal.program import Array, Program, StepOutput
from shoal_worker.batch_seeds import BatchSeeds
from shoal_worker.batches import Batch, Batches
from shoal_worker.devices import Device
from shoal_worker.evaluation import Evaluator
from shoal_worker.messages import TrainerReport
from shoal_worker.programs import as_out_of_memory_error, computing_on, told
from shoal_worker.step_counters import StepCounters

_REPORT_EVERY_S = 0.5
# A round without data lasts at least this long: enough to ask for data soon, too little to hold up anyone for long.
_IDLE_ROUND_S = 0.02
# More gradients in a row than this with NaN or Inf are not bad luck.
_MAX_REJECTED_IN_A_ROW = 10


class Parameters(Protocol):
    """What the loop needs of `Pipeline`."""

    @property
    def step(self) -> int:
        """The step to take next."""
        ...

    def pull(self) -> dict[str, np.ndarray]:
        """The variables, when the consistency mode lets this step have them; perhaps as `Device.bring` gave them."""
        ...

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None,
    ) -> PushResult:
        """Pushes this step's gradients and goes on to the next; "sent": `settle` will say what became of it."""
        ...

    def settle(self) -> PushResult | None:
        """Waits for a push that was sent."""
        ...

    def skip(self) -> PushResult:
        """Passes this step by, so that nobody waits for it."""
        ...

    def barrier(self) -> None:
        """Waits as `pull` does, and fetches nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step's result on the host; gradients perhaps one by one, as the program computes them."""

    gradients: Gradients
    updates: dict[str, np.ndarray] | None
    values: dict[str, float]  # loss and metrics


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a worker trains, and how.

    Attributes:
        name: of the program, for messages.
        program: what to compute.
        device: where to compute it; active on the thread that trains.
        max_steps: the step to stop at; 0: none.
        draws: gives the program a seed for each batch; None: it takes none.
        evaluator: evaluates where that is due; None: the job wants none.
        wire: the half that gradients of float32 travel in; None: they travel as they are.
    """

    name: str
    program: Program
    device: Device
    max_steps: int
    draws: BatchSeeds | None = None
    evaluator: Evaluator | None = None
    wire: np.dtype | None = None


class TrainingLoop:
    """One worker's training of one job.

    **A worker without data must not hold up the others.** It is told WAIT while others hold the last ranges, and has
    to stay, for a range whose worker dies comes to it. Were it to sit still, its clock would: a synchronous step
    waits for a contribution of every worker, and a bounded mode lets nobody run further ahead of the slowest than the
    bound. The others would wait for it, while it waits for them. So it keeps stepping: at each step it waits at the
    barrier, asks for data, and, if there is none, skips the step, which weighs nothing in the step's mean.

    - Synchronous: the barrier opens when the others have pushed, so the idle worker goes at their pace.
    - Bounded staleness: it runs ahead as far as the bound, where the barrier stops it until the slowest moves.
    - Asynchronous: no barrier ever waits, and neither does it when all workers are idle. There the pause paces it:
      a round without data lasts `_IDLE_ROUND_S` or longer. The pause comes after the skip, so it holds up nobody
      whose step takes that long.

    None of this looks at the mode. The barrier moves no values, so an idle worker costs no bandwidth.

    **The lease comes after the barrier**, not before: which ranges are given out at a synchronous step then depends
    only on the step, so that its joined batch is the same in each run, whichever worker gets which part of it.

    Args:
        config: what to train, and how.
        parameters: where values come from, brought to the device or not, and gradients go.
        batches: which samples come next.
        emit: is given the figures about every half second, and once at the end, however it ends. Must not block long.
        traces: of this worker's steps; those of `parameters`.
        clock: seconds, from any start.
        now: seconds of Unix time.
        stop: set to end after the step in progress.
        enough: set to be through after it.

    Raises:
        ProgramError: from `run`: the program raised, or its gradients were NaN or Inf too often in a row.
        InvalidGradient: from `run`: a gradient has a name, shape or dtype that the variables do not.
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
        enough: threading.Event | None = None,
    ) -> None:
        self._config, self._device = config, config.device
        self._parameters = parameters
        self._batches = batches
        self._emit = emit
        self._traces = traces or _tracing.Traces("step")
        self._clock = clock
        self._stop, self._enough = stop or threading.Event(), enough or threading.Event()
        self._tally = StepCounters(clock, now)
        self._rejected_in_a_row = 0
        self._computing_s = 0.0  # while the step's first gradients were pushed
        self._sent: tuple[int, dict[str, float]] = (0, {})  # samples and figures of the push that is on its way

    def run(self) -> bool:
        """Trains until the data is done, `max_steps` is reached, or `stop` is set.

        Returns:
            Whether there was nothing left to do. If not, all that `batches.cursor` counts has been pushed.
        """
        try:
            through = self._at_last_step()
            while not through and not self._stop.is_set():
                through = self._enough.is_set() or not self._advance() or self._at_last_step()
                if self._tally.age_s >= _REPORT_EVERY_S:
                    self._emit(self._figures())
            self._settle()
            if through:
                self._evaluate_at_end()
            else:
                # Its last push may be of a step that is still open. Once that is closed, no checkpoint can miss what
                # the ledger is told of.
                self._parameters.barrier()
            return through
        finally:
            self._emit(self._figures())

    def _figures(self) -> TrainerReport:
        return replace(self._tally.take(self._parameters.step), device_memory=self._device.memory())

    def _at_last_step(self) -> bool:
        return 0 < self._config.max_steps <= self._parameters.step

    def _advance(self) -> bool:
        """Trains on a batch, or gets some, or passes a step by; False when there is nothing left to do."""
        if self._batches.in_hand:
            return self._train()
        start = self._clock()
        with self._tally.timed("wait"), self._span("wait"):
            self._settle()
            self._parameters.barrier()
            answer, step = self._batches.lease(), self._parameters.step
            if answer is NoRange.WAIT:
                self._parameters.skip()
                self._stop.wait(max(0.0, start + _IDLE_ROUND_S - self._clock()))
        if answer is NoRange.WAIT:
            self._tally.stepped(step)
        return answer is not NoRange.FINISHED

    def _train(self) -> bool:
        """Trains on a batch; False when the job ends before its data is done."""
        with (
            self._tally.timed("pull"),
            as_out_of_memory_error(f"{self._who}: the pull for step {self._parameters.step}", self._where),
        ):
            params = self._pull()
        if not self._evaluate(params):
            return False
        step = self._parameters.step
        self._train_on(params)
        self._tally.stepped(step)
        return True

    def _pull(self) -> dict[str, Array]:
        """The variables for this step, on the device."""
        return self._device.receive(self._parameters.pull())

    def _evaluate(self, params: Mapping[str, Array]) -> bool:
        """Evaluates if that is due here, before the first step on trial; False when the job ends early."""
        evaluator, step = self._config.evaluator, self._parameters.step
        if evaluator is None:
            return True
        if evaluator.untried:
            with self._tally.timed("evaluate"), self._span("evaluate"):
                evaluator.check_program(step, params)
        if not evaluator.due(step):
            return True
        with self._tally.timed("evaluate"), self._span("evaluate"):
            return evaluator.at_step(step, params)

    def _evaluate_at_end(self) -> None:
        if self._config.evaluator is None:
            return
        with self._tally.timed("evaluate"), self._span("evaluate"):
            self._parameters.barrier()  # what was pulled ahead lacks the last push
            self._config.evaluator.at_end(self._parameters.step, self._pull)

    def _train_on(self, params: Mapping[str, Array]) -> None:
        with self._tally.timed("read"), self._span("read"), self._blamed("dataset.batch"):
            batch = self._batches.take()
        with self._tally.timed("compute"), self._span("compute", samples=batch.samples):
            computed = self._compute(params, batch)
        self._computing_s = 0.0
        try:
            with self._tally.timed("push", but=lambda: self._computing_s):
                result = self._push(computed, batch)
        finally:
            if self._computing_s:
                self._tally.observe("compute", self._computing_s)
        if result is None:
            return
        self._sent = batch.samples, computed.values
        if result.outcome != "sent":
            self._count(result)

    def _push(self, computed: _Computed, batch: Batch) -> PushResult | None:
        """What became of it; None: it held NaN or Inf, and its step is passed by."""
        self._settle()
        try:
            return self._parameters.push(
                computed.gradients, updates=computed.updates, weight=batch.samples or 1.0, cursor=batch.cursor
            )
        except errors.NonFiniteGradient as error:
            self._reject(error)
            self._parameters.skip()  # for the others may be waiting for this step
            return None

    def _settle(self) -> None:
        """Waits for the push of the step before, if it is still on its way."""
        try:
            result = self._parameters.settle()
        except errors.NonFiniteGradient as error:
            self._reject(error)  # and its step is passed by
            return
        if result:
            self._count(result)

    def _count(self, result: PushResult) -> None:
        self._rejected_in_a_row = 0
        self._tally.pushed(result, *self._sent)

    def _compute(self, params: Mapping[str, Array], given: Batch) -> _Computed:
        program, device = self._config.program, self._device
        with self._blamed("dataset.batch"):
            batch = device.put(given.data)
        with self._blamed("loss_and_gradients"):
            step = self._checked(program.loss_and_gradients(params, batch, **self._seeded(given)))
            who = f"{self._who}: loss_and_gradients, step {self._parameters.step}, gives"
            metrics = {name: number(value, f"{who} the metric {name!r}") for name, value in step.metrics.items()}
            gradients = step.gradients
            return _Computed(
                gradients=dict(device.fetch(gradients.items(), self._config.wire))
                if isinstance(gradients, Mapping)
                else self._one_by_one(gradients),
                updates=dict(device.fetch(step.updates.items())) or None,
                values={**metrics, "loss": number(step.loss, f"{who} the loss")},
            )

    def _seeded(self, batch: Batch) -> dict[str, int]:
        draws = self._config.draws
        return {} if draws is None else {"seed": draws.seed(batch.place, self._parameters.step)}

    def _checked(self, result: object) -> StepOutput:
        match result:
            case StepOutput():
                return result
            case (loss, (Mapping() | Iterator() | list() | tuple()) as gradients):
                return StepOutput(loss, gradients)
        raise errors.ProgramError(
            f"program {self._config.name}: loss_and_gradients returned a {type(result).__name__}; "
            "return (loss, gradients by name) or a shoal.Step"
        )

    def _one_by_one(self, gradients: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, np.ndarray]]:
        """Goes on with the program's computation, while what it has computed before is pushed."""
        with self._blamed("loss_and_gradients"):
            arrays = self._device.fetch(iter(gradients), self._config.wire)
        with closing(arrays):
            while True:
                start = self._clock()
                with self._blamed("loss_and_gradients"):
                    following = next(arrays, None)
                self._computing_s += self._clock() - start
                if following is None:
                    return
                yield following

    def _reject(self, error: errors.NonFiniteGradient) -> None:
        """Goes on without a gradient, unless that has happened too often."""
        self._tally.rejected()
        self._rejected_in_a_row += 1
        if self._rejected_in_a_row > _MAX_REJECTED_IN_A_ROW:
            raise errors.ProgramError(
                f"program {self._config.name}: {self._rejected_in_a_row} gradients in a row held NaN or Inf, "
                f"the last one at step {self._parameters.step} ({error.message}); the variables are as before the "
                "first of them. A lower learning rate, or a look at the data, may help"
            ) from None

    def _span(self, phase: str, **attributes: object) -> _tracing.Span:
        return self._traces.span(self._parameters.step, phase, **attributes)

    def _blamed(self, what: str) -> AbstractContextManager[None]:
        return told(f"{self._who}: {what}, step {self._parameters.step},", self._where)

    @property
    def _who(self) -> str:
        return f"program {self._config.name}"

    @property
    def _where(self) -> str:
        return computing_on(self._device, self._batches.batch_size)


__all__ = ["Parameters", "TrainingLoop"]

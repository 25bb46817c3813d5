"""Training loop with a fake server, a fake coordinator and a fake clock."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from shoal import errors
from shoal._numerics.seeds import takes_seed
from shoal._training import Gradients, PushResult
from shoal._wire import DataRange, Lease, NoRange
from shoal._wire.cursor import Cursor
from shoal.data._reading.permutation import IndexPermutation
from shoal.program import StepOutput
from shoal.status import StepTiming
from shoal_worker.arrays import Cpu
from shoal_worker.batch_seeds import BatchSeeds
from shoal_worker.batches import Batches, LeasedBatches, NoBatches
from shoal_worker.devices import Device
from shoal_worker.evaluation import Evaluator
from shoal_worker.messages import TrainerReport, decode, encode
from shoal_worker.training_loop import TrainingConfig, TrainingLoop
from support.devices.fake_cupy import FakeOutOfMemoryError, FakeRuntimeError

SAMPLES = 20


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FakeStop(threading.Event):
    """Waiting moves the clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.now += timeout or 0.0
        return self.is_set()


@dataclass
class FakeParameters:
    """Answers each push with the next of `answers`, then accepts; writes down what was asked of it.

    Where it overlaps, the answers come when they are settled.
    """

    clock: FakeClock
    answers: list[PushResult | Exception] = field(default_factory=list)
    step: int = 0
    overlap: bool = False
    pull_s: float = 0.125
    calls: list[str] = field(default_factory=list)
    pushes: list[tuple[float, Gradients, Mapping[str, np.ndarray] | None]] = field(default_factory=list)
    cursors: list[Cursor | None] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # the step whose push is on its way

    def pull(self) -> dict[str, np.ndarray]:
        self.calls.append("pull")
        self.clock.now += self.pull_s
        return {"w": np.full(2, float(self.step))}

    def barrier(self) -> None:
        self.calls.append("barrier")

    def skip(self) -> PushResult:
        self.calls.append("skip")
        self.step += 1
        return PushResult("skipped", 0, self.step)

    def push(
        self,
        gradients: Gradients,
        *,
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None,
    ) -> PushResult:
        self.calls.append("push")
        self.cursors.append(cursor)
        assert not self.sent, "the last push was not settled"
        answer = None if self.overlap else self.answer(self.step)
        self.pushes.append((weight, gradients, updates))
        if answer is None:
            self.sent.append(self.step)
            answer = PushResult("sent", 0, self.step + 1)
        self.step = answer.step
        return answer

    def settle(self) -> PushResult | None:
        if not self.sent:
            return None
        self.calls.append("settle")
        return self.answer(self.sent.pop())

    def answer(self, step: int) -> PushResult:
        answer = self.answers.pop(0) if self.answers else PushResult("accepted", 0, step + 1)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Samples:
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: np.ndarray) -> np.ndarray:
        return indices


class FakeProgram:
    def __init__(self, compute: Callable[..., Any] | None = None, dataset: Samples | None = None) -> None:
        self.dataset = dataset
        self.batches: list[Any] = []
        self.compute = compute or (lambda params, batch: (1.5, {"w": params["w"]}))

    def variables(self) -> dict[str, np.ndarray]:
        return {"w": np.zeros(2)}

    def loss_and_gradients(self, params: Mapping[str, Any], batch: Any) -> Any:
        self.batches.append(batch)
        return self.compute(params, batch)


class Rig:
    """A training with everything around it fake; `leases` are the coordinator's answers, in order."""

    made: ClassVar[list["Rig"]] = []

    def __init__(
        self,
        leases: Sequence[Lease | NoRange] = (),
        *,
        compute: Callable[..., Any] | None = None,
        answers: Sequence[PushResult | Exception] = (),
        max_steps: int = 0,
        batch_size: int = 4,
        data: bool = True,
        overlap: bool = False,
        program: FakeProgram | None = None,
        device: Device | None = None,
        seeds: BatchSeeds | None = None,
        evaluator: "FakeEvaluator | None" = None,
        stop_after_batch: threading.Event | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.stop = FakeStop(self.clock)
        self.parameters = FakeParameters(self.clock, list(answers), overlap=overlap)
        self.program = program or FakeProgram(compute, Samples() if data else None)
        self.done: list[int] = []
        self.leases = list(leases)
        self.emitted: list[TrainerReport] = []
        self.batches: Batches = NoBatches()
        if self.program.dataset is not None:
            self.batches = LeasedBatches(self.program.dataset, batch_size, seed=7, lease=self.lease)
        Rig.made.append(self)
        self.training = TrainingLoop(
            TrainingConfig(
                name="tests:program",
                program=self.program,
                device=device or Cpu(),
                max_steps=max_steps,
                seeds=seeds,
                evaluator=cast(Evaluator | None, evaluator),
            ),
            self.parameters,
            self.batches,
            emit=self.emitted.append,
            clock=self.clock,
            now=lambda: 1_000.0 + self.clock.now,
            stop=self.stop,
            stop_after_batch=stop_after_batch,
        )

    def lease(self, done: int) -> Lease | NoRange:
        self.done.append(done)
        self.parameters.calls.append("lease")
        return self.leases.pop(0)

    def run(self) -> "Rig":
        self.training.run()
        return self

    def total(self, name: str) -> int:
        return sum(getattr(emission.report, name) for emission in self.emitted)


@pytest.fixture(autouse=True)
def nothing_is_read_any_more() -> Iterator[None]:
    yield
    while Rig.made:
        Rig.made.pop().batches.close()


def test_a_range_is_cut_into_batches_of_the_epochs_permutation_and_given_back() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 8)), Lease(2, DataRange(0, 8, 18)), NoRange.FINISHED]).run()
    permutation = IndexPermutation(SAMPLES, seed=7, epoch=0).at(np.arange(SAMPLES))
    np.testing.assert_array_equal(np.concatenate(rig.program.batches), permutation[:18])
    assert [len(batch) for batch in rig.program.batches] == [4, 4, 4, 4, 2]
    assert [weight for weight, _, _ in rig.parameters.pushes] == [4, 4, 4, 4, 2]
    assert rig.done == [0, 1, 2]
    assert (rig.total("accepted"), rig.total("samples")) == (5, 18)


def test_epochs_are_shuffled_differently_and_cover_everything() -> None:
    rig = Rig(
        [Lease(1, DataRange(0, 0, SAMPLES)), Lease(2, DataRange(1, 0, SAMPLES)), NoRange.FINISHED],
        batch_size=SAMPLES,
    ).run()
    first, second = rig.program.batches
    assert not np.array_equal(first, second)
    assert set(first) == set(second) == set(range(SAMPLES))


def test_the_lease_comes_after_the_barrier_and_before_the_pull() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED]).run()
    assert rig.parameters.calls == ["barrier", "lease", "pull", "push", "barrier", "lease"]


@dataclass
class FakeEvaluator:
    """Evaluates at these steps; the job ends early after so many of them."""

    steps: tuple[int, ...] = ()
    patience: int = 99
    seen: list[tuple[int, float]] = field(default_factory=list)
    at_the_end: list[tuple[int, float]] = field(default_factory=list)
    tried: list[tuple[int, float]] = field(default_factory=list)

    @property
    def unchecked(self) -> bool:
        return not self.tried

    def check_program(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        self.tried.append((step, float(values["w"][0])))

    def due(self, step: int) -> bool:
        return step in self.steps

    def at_step(self, step: int, values: Mapping[str, np.ndarray]) -> bool:
        self.seen.append((step, float(values["w"][0])))
        return len(self.seen) < self.patience

    def at_end(self, step: int, pull: Callable[[], dict[str, Any]]) -> None:
        self.at_the_end.append((step, float(pull()["w"][0])))


@pytest.mark.parametrize("overlap", [False, True])
def test_evaluations_use_the_steps_pull_and_the_last_one_a_new_pull(overlap: bool) -> None:
    evaluator = FakeEvaluator(steps=(1, 2))
    rig = Rig([Lease(1, DataRange(0, 0, 16)), NoRange.FINISHED], evaluator=evaluator, overlap=overlap).run()
    assert evaluator.tried == [(0, 0.0)], "once, before the first step"
    assert evaluator.seen == [(1, 1.0), (2, 2.0)]
    assert evaluator.at_the_end == [(4, 4.0)]
    assert rig.total("accepted") == 4
    assert rig.parameters.calls[-2:] == ["barrier", "pull"], "nothing that was pulled before the last push"


def test_a_job_that_ends_early_takes_no_further_step() -> None:
    evaluator = FakeEvaluator(steps=(1, 2), patience=2)
    rig = Rig([Lease(1, DataRange(0, 0, 16))], evaluator=evaluator).run()
    assert rig.total("accepted") == 2
    assert evaluator.at_the_end == [(2, 2.0)]


def test_a_worker_that_must_leave_skips_the_final_evaluation() -> None:
    evaluator = FakeEvaluator(steps=(1,))
    rig = Rig([Lease(1, DataRange(0, 0, 16))], evaluator=evaluator)
    rig.stop.set()
    rig.run()
    assert not evaluator.at_the_end


class Noisy(FakeProgram):
    """Writes down its seeds."""

    def __init__(self, dataset: Samples | None = None) -> None:
        super().__init__(dataset=dataset)
        self.seeds: list[int] = []

    def loss_and_gradients(self, params: Mapping[str, Any], batch: Any, *, seed: int) -> Any:  # type: ignore[override]  # as RandomProgram
        self.seeds.append(seed)
        return super().loss_and_gradients(params, batch)


def seeds(*leases: Lease, rank: int = 0, start: int = 0, seed: int = 7, max_steps: int = 0) -> list[int]:
    """What a program is given that trains on these leases; without any, that makes its own batches."""
    program = Noisy(Samples() if leases else None)
    rig = Rig([*leases, NoRange.FINISHED], program=program, seeds=BatchSeeds(seed, rank), max_steps=max_steps)
    rig.parameters.step = start
    rig.run()
    return program.seeds


def test_a_batchs_seed_depends_on_neither_worker_nor_time() -> None:
    first, second = Lease(1, DataRange(0, 0, 8)), Lease(2, DataRange(0, 8, 16))
    drawn = seeds(first, second)
    assert len(set(drawn)) == 4
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seeds(Lease(5, DataRange(0, 8, 16)), rank=3, start=9) == drawn[2:]
    assert not set(seeds(Lease(1, DataRange(1, 0, 8)), Lease(1, DataRange(1, 8, 16)))) & set(drawn), "another epoch"
    assert not set(seeds(first, second, seed=8)) & set(drawn), "another job"


def test_seeds_without_data_follow_from_the_step_and_the_rank() -> None:
    drawn = seeds(max_steps=4)
    assert len(set(drawn)) == 4
    assert seeds(start=2, max_steps=4) == drawn[2:], "a job that goes on draws what it would have drawn"
    assert not set(seeds(rank=1, max_steps=4)) & set(drawn)


def test_a_program_is_asked_whether_it_takes_a_seed() -> None:
    assert takes_seed(Noisy().loss_and_gradients)
    assert not takes_seed(FakeProgram().loss_and_gradients)

    @functools.wraps(Noisy.loss_and_gradients)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return Noisy.loss_and_gradients(*args, **kwargs)

    assert takes_seed(functools.partial(wrapped, Noisy()))

    def by_position(params: Any, batch: Any, seed: int, /) -> None: ...

    assert not takes_seed(by_position)


def test_an_empty_range_is_given_back() -> None:
    assert Rig([Lease(1, DataRange(0, 4, 4)), NoRange.FINISHED]).run().done == [0, 1]


def test_a_worker_without_data_passes_its_steps_by_and_moves_no_values() -> None:
    rig = Rig([NoRange.WAIT, NoRange.WAIT, Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED]).run()
    idle = ["barrier", "lease", "skip"]
    assert rig.parameters.calls == [*idle, *idle, "barrier", "lease", "pull", "push", "barrier", "lease"]


def test_a_worker_without_data_neither_spins_nor_waits_longer_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([NoRange.WAIT] * 50 + [NoRange.FINISHED]).run()
    assert rig.clock.now == pytest.approx(50 * 0.02)

    slow = Rig([NoRange.WAIT] * 50 + [NoRange.FINISHED])

    def barrier() -> None:  # others take 0.1 s a step
        slow.clock.now += 0.1

    monkeypatch.setattr(slow.parameters, "barrier", barrier)
    assert slow.run().clock.now == pytest.approx(51 * 0.1)


def test_max_steps_counts_the_steps_of_the_job_not_of_the_worker() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, SAMPLES))], max_steps=5)
    rig.parameters.step = 3
    rig.run()
    assert rig.parameters.calls.count("push") == 2


def test_a_program_without_data_is_stepped_max_steps_times() -> None:
    rig = Rig(max_steps=3, data=False).run()
    assert rig.program.batches == [None, None, None]
    assert [weight for weight, _, _ in rig.parameters.pushes] == [1.0, 1.0, 1.0]
    assert rig.parameters.calls.count("barrier") == 0


def test_a_gradient_with_nan_is_counted_and_its_step_skipped() -> None:
    rig = Rig(
        [Lease(1, DataRange(0, 0, 12)), NoRange.FINISHED], answers=[errors.NonFiniteGradient("w holds NaN")]
    ).run()
    assert rig.parameters.calls[2:6] == ["pull", "push", "skip", "pull"]
    assert (rig.total("rejected"), rig.total("accepted"), rig.total("samples")) == (1, 2, 8)


def test_more_than_ten_such_gradients_in_a_row_fail_the_job() -> None:
    rig = Rig(max_steps=100, data=False, answers=[errors.NonFiniteGradient("w holds NaN")] * 20)
    with pytest.raises(errors.ProgramError, match=r"11 gradients in a row had NaN or Inf.*step 10 \(w holds NaN\)"):
        rig.run()
    assert rig.total("rejected") == 11


def test_one_good_gradient_ends_the_row() -> None:
    bad: list[PushResult | Exception] = [errors.NonFiniteGradient("NaN")] * 10
    answers = [*bad, PushResult("accepted", 0, 11), *bad]
    rig = Rig(max_steps=22, data=False, answers=answers).run()
    assert (rig.total("rejected"), rig.total("accepted")) == (20, 2)


def test_a_push_that_came_late_is_counted_and_training_goes_on_where_the_others_are() -> None:
    rig = Rig(max_steps=8, data=False, answers=[PushResult("dropped_late", 2, 6)]).run()
    assert (rig.total("dropped"), rig.total("accepted")) == (1, 2)


def test_an_invalid_gradient_ends_training_after_a_last_report() -> None:
    rig = Rig(
        data=False, max_steps=3, answers=[PushResult("accepted", 0, 1), errors.InvalidGradient("w has shape (3,)")]
    )
    with pytest.raises(errors.InvalidGradient, match="shape"):
        rig.run()
    assert rig.total("accepted") == 1


def raise_value_error(params: Mapping[str, np.ndarray], batch: Any) -> None:
    raise ValueError("upset")


@pytest.mark.parametrize("whole", [False, True], ids=["a pair", "a step"])
def test_gradients_may_come_one_by_one(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program computes while they are pushed counts as computing."""

    def compute(params: Mapping[str, np.ndarray], batch: Any) -> StepOutput | tuple[float, Iterator[Any]]:
        def gradients() -> Iterator[tuple[str, np.ndarray]]:
            for name in "wv":
                rig.clock.now += 1.0
                yield name, params["w"]

        return StepOutput(1.5, gradients()) if whole else (1.5, gradients())

    rig = Rig(compute=compute, data=False, max_steps=1)
    push = rig.parameters.push
    monkeypatch.setattr(rig.parameters, "push", lambda gradients, **options: push(dict(gradients), **options))
    rig.training.run()
    [(_, gradients, _)] = rig.parameters.pushes
    assert sorted(gradients) == ["v", "w"]
    assert sum(emission.durations["compute"].total_s for emission in rig.emitted) == 2.0


any_step_output: Callable[..., StepOutput] = StepOutput  # for gradients of a wrong type


def gradients_that_fail(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, Iterator[Any]]:
    def gradients() -> Iterator[tuple[str, np.ndarray]]:
        yield "w", params["w"]
        raise ZeroDivisionError

    return 1.5, gradients()


@pytest.mark.parametrize(
    "compute",
    [
        gradients_that_fail,
        lambda params, batch: (1.5, [np.zeros(3)]),
        lambda params, batch: any_step_output(1.5, [("w", params["w"]), 3]),
        lambda params, batch: any_step_output(1.5, None),
    ],
    ids=["raises", "no pairs", "no pair", "nothing"],
)
def test_a_program_whose_gradients_fail_one_by_one_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
    compute: Callable[..., Any],
) -> None:
    rig = Rig(compute=compute, data=False, max_steps=1)
    monkeypatch.setattr(rig.parameters, "push", lambda gradients, **options: dict(gradients))
    with pytest.raises(errors.ProgramError, match="loss_and_gradients, step 0"):
        rig.training.run()


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (
            raise_value_error,
            r"loss_and_gradients, step 0, raised ValueError: upset\n[\s\S]*raise_value_error",
        ),
        (lambda params, batch: params["v"], "KeyError: 'v'"),
        (lambda params, batch: 3.0, r"returned a float; return \(loss, gradients by name\)"),
        (lambda params, batch: (1.0, np.zeros(2)), "returned a tuple"),
        (lambda params, batch: ("low", {}), "step 0, gives the loss as str; give a number, or an array of one element"),
        (lambda params, batch: (np.ones(3), {}), r"step 0, gives the loss as ndarray of shape \(3,\); give a number"),
        (lambda params, batch: StepOutput(1.0, {}, metrics={"accuracy": "high"}), "gives the metric 'accuracy' as str"),
    ],
)
def test_a_program_that_raises_or_returns_something_else_is_blamed(compute: Callable[..., Any], said: str) -> None:
    with pytest.raises(errors.ProgramError, match=said) as raised:
        Rig(data=False, max_steps=3, compute=compute).run()
    assert "worker/shoal_worker" not in raised.value.message  # the room, beside which this test has its own folder


def too_much(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    return 0.0, {"w": np.empty(1 << 57)}  # on any host


def one_too_many(params: Mapping[str, np.ndarray], batch: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield "w", np.empty(1 << 57)


@pytest.mark.parametrize(
    "compute", [too_much, lambda params, batch: (0.0, one_too_many(params, batch))], ids=["at once", "one by one"]
)
def test_a_program_that_runs_out_of_memory_says_how_much_it_asked_for_and_with_which_batch(
    monkeypatch: pytest.MonkeyPatch,
    compute: Callable[..., Any],
) -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 8)), NoRange.FINISHED], compute=compute, batch_size=4)
    monkeypatch.setattr(rig.parameters, "push", lambda gradients, **_: PushResult("accepted", len(dict(gradients)), 1))
    with pytest.raises(errors.ProgramError) as raised:
        rig.run()
    assert (
        "program tests:program: loss_and_gradients, step 0, ran out of memory on cpu, with a batch of 4 samples: "
        "Unable to allocate 1.00 EiB"
    ) in raised.value.message
    assert "Reduce the job's batch_size" in raised.value.message
    assert "test_training_loop.py" in raised.value.message, "the program's own lines are shown"


def test_a_pull_that_does_not_fit_on_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 8)), NoRange.FINISHED])

    def pull() -> None:
        raise FakeOutOfMemoryError("Out of memory allocating 400 bytes")

    monkeypatch.setattr(rig.parameters, "pull", pull)
    with pytest.raises(
        errors.ProgramError,
        match=r"the pull for step 0 ran out of memory on cpu, with a batch of 4 samples: .*allocating 400 bytes",
    ):
        rig.run()


def test_a_program_without_a_data_set_has_no_size_of_batches_to_tell() -> None:
    with pytest.raises(errors.ProgramError, match="step 0, ran out of memory on cpu: Unable to allocate"):
        Rig(data=False, max_steps=1, compute=too_much).run()


@pytest.mark.parametrize(
    "said",
    [
        "CUBLAS_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CURAND_STATUS_ALLOCATION_FAILED",
        "cudaErrorMemoryAllocation: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ],
)
def test_a_library_that_finds_no_room_beside_the_pool_is_out_of_memory_too(said: str) -> None:
    def compute(params: Mapping[str, np.ndarray], batch: np.ndarray) -> None:
        raise FakeRuntimeError(said)

    with pytest.raises(errors.ProgramError, match=f"ran out of memory on cpu, with a batch of 4 samples: {said}"):
        Rig([Lease(1, DataRange(0, 0, 8))], compute=compute).run()


def received(emission: TrainerReport) -> TrainerReport:
    """The report as the daemon decodes it."""
    found = decode(encode(emission))
    assert isinstance(found, TrainerReport)
    return found


class OnDevice(Cpu):
    """The host, with a memory to tell of."""

    def memory(self) -> dict[str, int]:
        return {"used": 1, "pool": 2, "limit": 3}


def test_reports_contain_the_memory_of_the_device() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED], device=OnDevice()).run()
    assert [received(emission).device_memory for emission in rig.emitted] == [{"used": 1, "pool": 2, "limit": 3}]


def test_a_dataset_that_raises_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 4))])
    monkeypatch.setattr(rig.program.dataset, "batch", lambda indices: indices[99])
    with pytest.raises(errors.ProgramError, match=r"dataset\.batch, step 0, raised IndexError"):
        rig.run()


def test_updates_and_metrics_of_a_step_arrive() -> None:
    def compute(params: Mapping[str, np.ndarray], batch: Any) -> StepOutput:
        metrics = {"accuracy": 0.5, "top5": np.full((1, 1), 0.75)}
        return StepOutput(np.full(1, 2.0), {"w": params["w"]}, updates={"n": np.array(1)}, metrics=metrics)

    rig = Rig(data=False, max_steps=1, compute=compute).run()
    assert rig.parameters.pushes[0][2] == {"n": np.array(1)}
    values = rig.emitted[-1].report.values
    assert (values["loss"], values["accuracy"], values["top5"]) == (2.0, 0.5, 0.75)


def timings(rig: Rig) -> list[StepTiming]:
    return [timing for emission in rig.emitted for timing in received(emission).report.timings]


def slowly(clock: FakeClock, seconds: float, call: Callable[..., PushResult]) -> Callable[..., PushResult]:
    """The same call, which takes so long first."""

    def slow(*arguments: Any, **options: Any) -> PushResult:
        clock.now += seconds
        return call(*arguments, **options)

    return slow


def test_reports_contain_the_timings_of_each_step() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 8)), NoRange.FINISHED])

    def compute(params: Mapping[str, np.ndarray], batch: np.ndarray) -> tuple[float, dict[str, Any]]:
        rig.clock.now += 0.25
        return 1.0, {}

    rig.program.compute = compute
    assert timings(rig.run()) == [
        StepTiming(0, 1_000.0, pull=0.125, read=0.0, compute=0.25, push=0.0, wait=0.0),
        StepTiming(1, 1_000.375, pull=0.125, read=0.0, compute=0.25, push=0.0),
    ]


def test_timings_of_an_overlapped_step_contain_the_wait_for_the_last_push(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(data=False, max_steps=3, overlap=True)
    monkeypatch.setattr(rig.parameters, "answer", slowly(rig.clock, 0.5, rig.parameters.answer))
    assert [(timing.step, timing.push) for timing in timings(rig.run())] == [(0, 0.0), (1, 0.5), (2, 0.5)]


def test_timings_contain_skipped_steps() -> None:
    rig = Rig([NoRange.WAIT, Lease(1, DataRange(0, 0, 4)), NoRange.FINISHED])
    idle, trained = timings(rig.run())
    assert (idle.step, idle.own) == (0, 0.0)
    assert idle.wait == pytest.approx(0.02)
    assert trained.step == 1
    assert (trained.began, trained.pull) == pytest.approx((1_000.02, 0.125))


def test_timings_split_compute_from_push_if_gradients_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(data=False, max_steps=1)

    def gradients() -> Iterator[tuple[str, np.ndarray]]:
        rig.clock.now += 0.5
        yield "w", np.zeros(2)

    rig.program.compute = lambda params, batch: (1.0, gradients())
    push = slowly(rig.clock, 0.25, rig.parameters.push)
    monkeypatch.setattr(rig.parameters, "push", lambda given, **how: push(dict(given), **how))
    (timing,) = timings(rig.run())
    assert (timing.compute, timing.push) == (0.5, 0.25)


def test_timings_split_compute_from_a_refused_push_if_gradients_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(data=False, max_steps=1)

    def gradients() -> Iterator[tuple[str, np.ndarray]]:
        rig.clock.now += 0.5
        yield "w", np.zeros(2)
        rig.clock.now += 0.125

    def refuse(given: Iterator[Any], **how: Any) -> None:
        dict(given)
        rig.clock.now += 0.25
        raise errors.NonFiniteGradient("w held NaN")

    rig.program.compute = lambda params, batch: (1.0, gradients())
    monkeypatch.setattr(rig.parameters, "push", refuse)
    (timing,) = timings(rig.run())
    assert (timing.compute, timing.push) == (0.625, 0.25)


def test_reports_hold_means_and_counts_of_about_half_a_second() -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    answers = [PushResult("accepted", staleness, step + 1) for step, staleness in enumerate([0, 3, 3, 5000, 0])]
    rig = Rig(data=False, max_steps=5, compute=lambda params, batch: (next(losses), {}), answers=answers).run()
    first, last = rig.emitted  # a pull takes 0.125 s
    assert (first.report.accepted, first.report.step, first.report.values["loss"]) == (4, 4, 2.5)
    assert first.report.staleness == {0: 1, 3: 2, 1023: 1}
    assert first.report.values["wait_share"] == pytest.approx(1.0)
    assert first.durations["pull"].total_s == pytest.approx(0.5)
    assert sum(first.durations["compute"].counts) == 4
    assert (last.report.accepted, last.report.step, last.report.values["loss"]) == (1, 5, 5.0)


@pytest.mark.parametrize(("overlap", "pull_s", "share"), [(False, 0.125, 0.25), (True, 0.0, 0.0), (True, 0.125, 0.25)])
def test_wait_share_follows_the_clock(overlap: bool, pull_s: float, share: float) -> None:
    rig = Rig(data=False, max_steps=4, overlap=overlap)

    def compute(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, dict[str, Any]]:
        rig.clock.now += 0.375
        return 1.0, {}

    rig.program.compute, rig.parameters.pull_s = compute, pull_s
    rig.run()
    values = [emission.report.values for emission in rig.emitted]
    shares = [each["wait_share"] for each in values if "wait_share" in each]
    assert shares == pytest.approx([share] * len(shares))
    assert shares


def test_a_push_is_settled_before_the_next_one_and_before_the_end() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 12)), NoRange.FINISHED], overlap=True).run()
    step = ["pull", "settle", "push"]
    assert rig.parameters.calls == ["barrier", "lease", "pull", "push", *step, *step, "settle", "barrier", "lease"]
    assert (rig.total("accepted"), rig.total("samples")) == (3, 12)

    rig = Rig(max_steps=2, data=False, overlap=True).run()
    assert rig.parameters.calls == ["pull", "push", *step, "settle"]
    assert rig.total("accepted") == 2


def test_a_push_is_settled_before_a_worker_without_data_passes_its_step_by() -> None:
    rig = Rig([Lease(1, DataRange(0, 0, 4)), NoRange.WAIT, NoRange.FINISHED], overlap=True).run()
    assert rig.parameters.calls[2:] == ["pull", "push", "settle", "barrier", "lease", "skip", "barrier", "lease"]


def test_a_late_answer_counts_with_the_metrics_of_its_own_push() -> None:
    losses = iter([1.0, 2.0, 3.0])
    late = [PushResult("accepted", 4, 1), PushResult("dropped_late", 0, 2), PushResult("accepted", 2, 3)]
    rig = Rig(
        [Lease(1, DataRange(0, 0, 10)), NoRange.FINISHED],
        compute=lambda *_: (next(losses), {}),
        answers=late,
        overlap=True,
    ).run()
    assert (rig.total("accepted"), rig.total("dropped"), rig.total("samples")) == (2, 1, 4 + 2)
    assert rig.emitted[-1].report.values["loss"] == 2.0
    assert rig.emitted[-1].report.staleness == {4: 1, 2: 1}


def test_nan_that_shows_when_a_push_is_settled_is_counted_and_the_next_step_goes_on() -> None:
    nan = errors.NonFiniteGradient("w holds NaN")
    rig = Rig([Lease(1, DataRange(0, 0, 12)), NoRange.FINISHED], answers=[nan], overlap=True).run()
    assert rig.parameters.calls.count("push") == 3
    assert "skip" not in rig.parameters.calls, "the next pull passes the step by"
    assert (rig.total("rejected"), rig.total("accepted"), rig.total("samples")) == (1, 2, 8)

    rig = Rig(max_steps=3, data=False, answers=[PushResult("accepted", 0, 1)] * 2 + [nan], overlap=True).run()
    assert (rig.total("rejected"), rig.total("accepted")) == (1, 2)


def test_more_than_ten_such_pushes_in_a_row_fail_the_job_though_it_overlaps() -> None:
    rig = Rig(max_steps=100, data=False, answers=[errors.NonFiniteGradient("NaN")] * 20, overlap=True)
    with pytest.raises(errors.ProgramError, match="11 gradients in a row had NaN or Inf"):
        rig.run()
    assert rig.total("rejected") == 11


def test_an_error_of_a_sent_push_ends_training_after_a_last_report() -> None:
    answers: list[PushResult | Exception] = [PushResult("accepted", 0, 1), errors.Fenced("declared lost")]
    rig = Rig(max_steps=9, data=False, answers=answers, overlap=True)
    with pytest.raises(errors.Fenced):
        rig.run()
    assert rig.total("accepted") == 1


def test_stopping_ends_after_the_step_in_progress() -> None:
    rig = Rig(data=False, max_steps=100)

    def compute(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, dict[str, Any]]:
        rig.stop.set()
        return 1.0, {}

    rig.program.compute = compute
    rig.run()
    assert rig.parameters.calls == ["pull", "push", "barrier"], "it left before its step was closed"


def test_pushes_say_how_much_of_the_lease_is_trained_on() -> None:
    rig = Rig([Lease(7, DataRange(0, 0, 6)), NoRange.WAIT, Lease(9, DataRange(0, 6, 10)), NoRange.FINISHED]).run()
    assert rig.parameters.cursors == [Cursor(7, 4), Cursor(7, 6), Cursor(9, 4)]
    assert Rig(max_steps=2, data=False).run().parameters.cursors == [None, None]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_stops_within_a_range_has_a_cursor_and_has_pushed_up_to_it(overlap: bool) -> None:
    rig = Rig([Lease(7, DataRange(0, 0, 12))], overlap=overlap)

    def compute(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, dict[str, Any]]:
        if len(rig.program.batches) == 2:
            rig.stop.set()
        return 1.0, {}

    rig.program.compute = compute
    assert not rig.training.run()
    assert rig.batches.cursor == Cursor(7, 8)
    assert (len(rig.parameters.pushes), rig.parameters.sent) == (2, [])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_finishes_within_a_range_ends_when_its_last_step_is_closed(overlap: bool) -> None:
    rig = Rig([Lease(7, DataRange(0, 0, 12))], overlap=overlap, max_steps=2)
    assert rig.training.run()
    assert rig.batches.cursor == Cursor(7, 8)
    assert rig.parameters.calls[-1] == "barrier"
    assert rig.parameters.sent == []


def test_a_worker_that_stops_without_data_has_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([NoRange.WAIT])
    monkeypatch.setattr(rig.parameters, "skip", rig.stop.set)
    assert not rig.training.run()
    assert rig.batches.cursor is None


def test_a_worker_at_its_end_is_finished_even_if_it_was_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([NoRange.FINISHED])
    monkeypatch.setattr(rig.parameters, "barrier", rig.stop.set)
    assert rig.training.run()


def test_stop_after_batch_finishes_the_worker_after_its_batch() -> None:
    evaluator, stop_after_batch = FakeEvaluator(), threading.Event()
    rig = Rig([Lease(1, DataRange(0, 0, 16))], evaluator=evaluator, stop_after_batch=stop_after_batch)

    def compute(params: Mapping[str, np.ndarray], batch: Any) -> tuple[float, dict[str, Any]]:
        stop_after_batch.set()
        return 1.5, {"w": params["w"]}

    rig.program.compute = compute
    assert rig.training.run(), "it is through, and does not leave"
    assert rig.total("accepted") == 1
    assert evaluator.at_the_end == [(1, 1.0)]

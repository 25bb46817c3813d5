"""Evaluation of held-out samples: metrics of a whole set, locally and by the worker that claimed the evaluation."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._wire import EvaluationAck, EvaluationClaim
from shoal.evaluation import MetricTotals
from shoal.status import Evaluation
from shoal_worker.arrays import Cpu
from shoal_worker.evaluation import Evaluator


@dataclass(frozen=True)
class Most:
    """The largest number, as a metric of a whole set. Its type is not checked, as in a user's program."""

    most: Any

    def merged_with(self, other: "Most") -> "Most":
        return Most(max(self.most, other.most))

    def value(self) -> Any:
        return self.most


class Numbers:
    """0, 1, 2 and so on; as float64."""

    def __init__(self, count: int, prefetch: int = 2) -> None:
        self.count, self.prefetch = count, prefetch
        self.read: list[list[int]] = []

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> np.ndarray:
        self.read.append(indices.tolist())
        return indices.astype(np.float64)


Evaluate = Callable[[np.ndarray], Any]


def mean_and_most(x: np.ndarray) -> dict[str, Any]:
    return {"mean": x.mean(), "most": Most(x.max())}


class Program:
    """Its metrics are of the numbers, times w."""

    def __init__(self, count: int = 10, evaluate: Evaluate = mean_and_most, **options: Any) -> None:
        self.dataset = None
        self.held_out: Any = Numbers(count, **options)  # a test may replace it by another object
        self.evaluate_batch = evaluate

    def variables(self) -> dict[str, np.ndarray]:
        return {"w": np.ones(1)}

    def loss_and_gradients(self, params: Mapping[str, np.ndarray], batch: object) -> tuple[float, Mapping[str, Any]]:
        return 0.0, params

    def evaluate(self, params: Mapping[str, np.ndarray], batch: np.ndarray) -> Any:
        return self.evaluate_batch(batch * params["w"])


@dataclass
class FakeCoordinator:
    """Gives a turn for each of these, and asks to wait so often."""

    turns: list[EvaluationClaim] = field(default_factory=list)
    waits: int = 0
    stop: bool = False
    asked: list[tuple[int, bool]] = field(default_factory=list)
    told: list[Evaluation] = field(default_factory=list)

    def claim_evaluation(self, step: int, *, finished_training: bool = False) -> EvaluationClaim:
        self.asked.append((step, finished_training))
        return self.turns.pop(0) if self.turns else EvaluationClaim()

    def report_evaluation(self, result: Evaluation) -> EvaluationAck:
        self.told.append(result)
        self.waits -= 1
        return EvaluationAck(self.waits >= 0, self.stop)


class Stop(threading.Event):
    """Waiting takes no time, and is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout)
        return self.is_set()


def evaluator(
    coordinator: FakeCoordinator,
    program: Program | None = None,
    *,
    metric: str = "mean",
    every: int = 10,
    stop: Stop | None = None,
) -> Evaluator:
    ticks = iter(range(1_000_000))
    return Evaluator(
        "tests:program",
        program or Program(),
        Cpu(),
        coordinator,
        policy=shoal.EvaluationPolicy(metric=metric, mode="max", every_steps=every),
        batch_size=4,
        stop=stop or Stop(),
        clock=lambda: float(next(ticks)),
    )


VALUES = {"w": np.array([2.0])}


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
def test_metrics_do_not_depend_on_the_batch_size(size: int) -> None:
    assert shoal.evaluate(Program(), VALUES, batch_size=size) == {"mean": pytest.approx(9.0), "most": 18.0}


def test_claimed_evaluation_reads_all_batches_and_is_reported() -> None:
    program, coordinator = Program(), FakeCoordinator([EvaluationClaim(3)])
    assert evaluator(coordinator, program).at_step(20, VALUES)
    assert program.held_out.read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    [told] = coordinator.told
    assert (told.number, told.step, told.samples) == (3, 20, 10)
    assert told.values == {"mean": pytest.approx(9.0), "most": 18.0}
    assert told.seconds > 0


def test_worker_claims_once_at_each_interval() -> None:
    coordinator = FakeCoordinator()
    mine = evaluator(coordinator)
    for step in range(5, 45, 3):
        if mine.due(step):
            assert mine.at_step(step, VALUES)
    assert coordinator.asked == [(11, False), (20, False), (32, False), (41, False)]
    assert not coordinator.told
    assert not any(evaluator(coordinator, every=0).due(step) for step in range(100))


def test_worker_stops_when_the_job_ends_early() -> None:
    assert not evaluator(FakeCoordinator([EvaluationClaim(0, stop=True)])).at_step(10, VALUES)
    assert not evaluator(FakeCoordinator([EvaluationClaim(1)], stop=True)).at_step(10, VALUES), "for what it has found"


def test_worker_waits_until_the_checkpoint_of_its_values_has_begun() -> None:
    coordinator, stop = FakeCoordinator([EvaluationClaim(1)], waits=3), Stop()
    evaluator(coordinator, stop=stop).at_step(10, VALUES)
    assert len(coordinator.told) == 4
    assert len(set(map(id, coordinator.told))) == 1, "the same each time"
    assert stop.waited == [0.01, 0.02, 0.04]


def test_worker_waits_for_a_limited_time() -> None:
    coordinator = FakeCoordinator([EvaluationClaim(1)], waits=1_000)
    evaluator(coordinator).at_step(10, VALUES)
    assert len(coordinator.told) < 20


def test_worker_pulls_at_the_end_only_for_a_claimed_evaluation() -> None:
    coordinator = FakeCoordinator([EvaluationClaim(0), EvaluationClaim(5)])
    mine, pulls = evaluator(coordinator), itertools.count()

    def pull() -> dict[str, np.ndarray]:
        next(pulls)
        return VALUES

    for _ in range(2):
        mine.at_end(33, pull)
    assert coordinator.asked == [(33, True), (33, True)]
    assert next(pulls) == len(coordinator.told) == 1


def test_stopping_worker_abandons_its_evaluation() -> None:
    stop, coordinator = Stop(), FakeCoordinator([EvaluationClaim(1)])

    def evaluate_and_stop(x: np.ndarray) -> dict[str, float]:
        stop.set()
        return {"mean": float(x.mean())}

    program = Program(evaluate=evaluate_and_stop)
    assert evaluator(coordinator, program, stop=stop).at_step(10, VALUES)
    assert not coordinator.told


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        (lambda x: x.mean(), "return from 1 to 256 metrics by name"),
        (lambda x: {}, "return from 1 to 256 metrics by name"),
        (lambda x: {str(x[0]): 1.0}, "return the same metrics for all"),
        (lambda x: {"mean": "high"}, r"^evaluate\(\) gives 'mean' as str; give a number or an AggregateMetric$"),
        (lambda x: {"mean": "1"}, "gives 'mean' as str"),
        (
            lambda x: {"mean": np.ones(3)},
            r"gives 'mean' as ndarray of shape \(3,\); give a number or an AggregateMetric$",
        ),
        (lambda x: {"mean": np.ones(0)}, r"gives 'mean' as ndarray of shape \(0,\)"),
        (lambda x: {"mean": None}, "gives 'mean' as NoneType"),
        (lambda x: {"mean": 10**400}, "gives 'mean' as int"),
        (lambda x: {"most": Most("high")}, "gives 'most' as str"),
        (lambda x: {"mean": 1.0, 3: 1.0}, "names a metric 3; a name must be text of 1 to 256 bytes of UTF-8"),
        (lambda x: {"": 1.0}, "names a metric ''"),
        (lambda x: {"\ud83d": 1.0}, r"names a metric '\\ud83d'"),
        (lambda x: {"ü" * 129: 1.0}, "names a metric 'üü"),
        (lambda x: 1 / 0, "evaluate, step 10, raised ZeroDivisionError"),
    ],
)
def test_invalid_metrics_raise_an_error(evaluate: Callable[..., Any], said: str) -> None:
    with pytest.raises(errors.ProgramError, match=said):
        evaluator(FakeCoordinator([EvaluationClaim(1)]), Program(evaluate=evaluate)).at_step(10, VALUES)


@pytest.mark.parametrize("figure", [0.5, np.float32(0.5), np.array(0.5), np.full((1,), 0.5), np.full((1, 1), 0.5)])
def test_metric_is_a_number_or_an_array_of_one_element(figure: float | np.ndarray) -> None:
    assert shoal.evaluate(Program(evaluate=lambda _: {"x": figure, "y": Most(figure)}), VALUES) == {"x": 0.5, "y": 0.5}


def test_a_traceback_begins_with_the_program() -> None:
    class Separate(Most):
        def merged_with(self, other: Most) -> Most:
            raise RuntimeError("not these two")

    measure = Separate(1.0)
    with pytest.raises(errors.ProgramError, match="not these two") as caught:
        evaluator(FakeCoordinator([EvaluationClaim(1)]), Program(evaluate=lambda _: {"most": measure})).at_step(
            10, VALUES
        )
    assert caught.value.message.count('File "') == 1


def test_check_evaluates_one_batch_and_reports_nothing() -> None:
    program, coordinator = Program(), FakeCoordinator()
    mine = evaluator(coordinator, program)
    assert mine.unchecked
    mine.check_program(0, VALUES)
    assert not mine.unchecked
    assert program.held_out.read == [[0, 1, 2, 3]]
    assert not coordinator.asked
    assert not coordinator.told


def without_samples(program: Program) -> None:
    program.held_out = Numbers(0)


def with_a_method(program: Program) -> None:
    program.held_out = program.variables


def with_a_list(program: Program) -> None:
    program.held_out = [1, 2]


def that_raises(program: Program) -> None:
    program.evaluate_batch = lambda x: 1 / 0


def of_another_name(program: Program) -> None:
    program.evaluate_batch = lambda x: {"accuracy": 1.0, "auc": 0.5}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_samples, "held_out has no samples"),
        (with_a_method, "held_out is a method without __len__ and batch.*as an attribute or a property"),
        (with_a_list, "held_out is a list without"),
        (that_raises, "program tests:program: evaluate, step 7, raised ZeroDivisionError"),
        (of_another_name, "tests:program: evaluate gives accuracy, auc, but the job asks for 'mean'; set the metric"),
    ],
)
def test_check_finds_invalid_programs(spoil: Callable[[Program], None], said: str) -> None:
    program = Program()
    spoil(program)
    with pytest.raises(errors.ProgramError, match=said):
        evaluator(FakeCoordinator(), program).check_program(7, VALUES)


class NumbersInBlocks(Numbers):
    """Numbers that are read in ranges only."""

    blocks = shoal.program.Blocks([0, 5, 10])

    def batches(self, plan: list[np.ndarray]) -> Iterator[np.ndarray]:
        for numbers in plan:
            yield super().batch(numbers)

    def batch(self, indices: np.ndarray) -> np.ndarray:
        raise AssertionError("it is read by batches(plan)")


def test_samples_in_blocks_are_read_by_plan() -> None:
    program = Program()
    program.held_out = NumbersInBlocks(10)
    metrics = {"mean": pytest.approx(9.0), "most": 18.0}
    assert shoal.evaluate(program, VALUES, batch_size=4) == metrics
    coordinator = FakeCoordinator([EvaluationClaim(1)])
    evaluator(coordinator, program).at_step(10, VALUES)
    assert coordinator.told[0].values == metrics
    assert program.held_out.read == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_that_cannot_be_read_are_the_programs_fault(prefetch: int) -> None:
    program = Program(prefetch=prefetch)
    program.held_out.batch = lambda indices: 1 / 0
    with pytest.raises(errors.ProgramError, match=r"held_out.batch, step 10, raised ZeroDivisionError"):
        evaluator(FakeCoordinator([EvaluationClaim(1)]), program).at_step(10, VALUES)


def test_empty_held_out_set_is_refused() -> None:
    with pytest.raises(errors.ProgramError, match="held_out has no samples"):
        evaluator(FakeCoordinator([EvaluationClaim(1)]), Program(count=0)).at_step(10, VALUES)
    with pytest.raises(errors.ProgramError, match="held_out has no samples"):
        shoal.evaluate(Program(count=0), VALUES)


def test_a_program_without_held_out_samples_is_refused_at_the_start() -> None:
    program = Program()
    del program.held_out
    with pytest.raises(errors.ProgramError, match=r"lacks `held_out` or the method evaluate\(\)"):
        evaluator(FakeCoordinator(), program)


def test_total_of_aggregate_metrics_only() -> None:
    total = MetricTotals()
    total.add({"most": Most(3.0)}, 2)
    total.add({"most": Most(5.0)}, 2)
    assert (total.metrics(), total.samples) == ({"most": 5.0}, 4)

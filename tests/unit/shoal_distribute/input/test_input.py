"""Distributed data sets: the parts of replicas, batches for one replica, and processes that run out of data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal.data import Arrays, AutoShardPolicy, Options, from_arrays, from_generator
from shoal.program import Array
from shoal_distribute import MirroredStrategy
from shoal_distribute.input import DistributedDataset, InputContext, Replicas, distribute, distribute_from_function
from shoal_distribute.input.distributed import Agree
from shoal_distribute.values import PerReplica

TEN = np.arange(10)
any_distribute: Callable[..., Any] = distribute


class Place:
    """A device that records what is put on it."""

    def __init__(self) -> None:
        self.arrays: list[list[int]] = []

    def put(self, array: Array) -> Array:
        self.arrays.append(array.tolist())
        return array


def places(count: int) -> list[Place]:
    return [Place() for _ in range(count)]


def context(replicas: int, processes: int = 1, process: int = 0) -> InputContext:
    return InputContext(processes, process, processes * replicas)


def replicas(count: int, processes: int = 1, process: int = 0, agree: Agree | None = None) -> Replicas:
    return Replicas(context(count, processes, process), places(count), process * count, agree)


def steps(dataset: DistributedDataset) -> list[list[list[int]]]:
    return [[part.tolist() for part in value.values] for value in dataset]


def test_each_replica_gets_its_part_on_its_device() -> None:
    devices = places(3)
    dataset = distribute(from_arrays(TEN).batch(5), Replicas(context(3), devices))
    assert steps(dataset) == [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]
    assert [device.arrays for device in devices] == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]
    assert len(dataset) == 2
    assert steps(dataset) == steps(dataset)


def test_arrays_keep_their_places_in_tuples_and_dicts() -> None:
    dataset = distribute(from_arrays({"x": TEN, "y": (TEN, TEN * 2)}).batch(4), replicas(2))
    value = next(iter(dataset))
    assert isinstance(value["x"], PerReplica)
    assert [part.tolist() for part in value["y"][1].values] == [[0, 2], [4, 6]]


def test_one_replica_gets_plain_arrays() -> None:
    [(x, y), *_] = distribute(from_arrays(TEN, TEN).batch(4), replicas(1))
    assert x.tolist() == y.tolist() == [0, 1, 2, 3]


def test_last_replicas_get_no_rows_of_a_short_batch() -> None:
    dataset = distribute(from_arrays(TEN).batch(4), replicas(4))
    assert steps(dataset)[-1] == [[8], [9], [], []]


def test_processes_share_each_batch() -> None:
    parts = [steps(distribute(from_arrays(TEN).batch(5), replicas(2, 2, it))) for it in range(2)]
    assert parts == [[[[0, 1], [2]], [[5, 6], [7]]], [[[3], [4]], [[8], [9]]]]


def test_iterables_of_batches_are_distributed() -> None:
    dataset = distribute([TEN[:4], TEN[4:7]], replicas(2))
    assert steps(dataset) == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    with pytest.raises(TypeError, match="unknown"):
        len(dataset)
    assert dataset, "it is true all the same"


def test_function_makes_batches_for_one_replica() -> None:
    def make(given: InputContext) -> Any:
        size = given.get_per_replica_batch_size(8)
        return from_arrays(TEN).shard(given.num_input_pipelines, given.input_pipeline_id).batch(size)

    parts = [distribute_from_function(make, replicas(2, 2, it)) for it in range(2)]
    assert [steps(it) for it in parts] == [[[[0, 2], [4, 6]], [[8], []]], [[[1, 3], [5, 7]], [[9], []]]]
    assert [len(it) for it in parts] == [2, 2]


def test_process_without_data_takes_steps_while_others_have_data() -> None:
    answers = iter([True, True, True, False])
    asked: list[bool] = []

    def agree(has: bool) -> bool:
        asked.append(has)
        return next(answers)

    off = Options()
    off.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    batches = from_generator(lambda: [(TEN[:4], TEN[:4])]).with_options(off)
    dataset = distribute(batches, replicas(2, 2, agree=agree))
    given = [[part.tolist() for part in x.values] for x, _ in dataset]
    assert given == [[[0], [1]], [[2], [3]], [[], []]]
    assert asked == [True, True, False, False]
    nothing = distribute(from_generator(lambda: []), replicas(2, 2, agree=lambda _: True))
    with pytest.raises(
        errors.InvalidData, match=r"no batch in the first step, but other processes .*AutoShardPolicy.DATA"
    ):
        next(iter(nothing))


def test_context_divides_a_global_batch() -> None:
    assert context(2, 2).get_per_replica_batch_size(8) == 2
    with pytest.raises(
        errors.BadRequest, match="a global batch of 9 samples cannot be divided evenly between 4 replicas"
    ):
        context(2, 2).get_per_replica_batch_size(9)


def test_strategy_divides_a_batch_between_its_replicas() -> None:
    with closing(MirroredStrategy(["/cpu:0", "/cpu:1"])) as strategy:
        dataset = strategy.experimental_distribute_dataset(from_arrays(TEN, TEN * 2).batch(4).prefetch(2))
        sums = [strategy.run(lambda x, y: x.sum() + y.sum(), args=batch) for batch in dataset]
        assert [strategy.reduce("sum", it) for it in sums] == [18, 66, 51]
        each = strategy.distribute_datasets_from_function(
            lambda given: from_arrays(TEN).batch(given.get_per_replica_batch_size(10))
        )
        assert steps(each) == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]


def iterator() -> Iterator[np.ndarray]:
    return iter([TEN])


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Arrays(TEN), r"a Arrays has no batches; give shoal.data.pipeline\(dataset\).batch"),
        (iterator(), "cannot be iterated once for each epoch"),
        (3, "a int cannot be iterated"),
        (distribute([TEN], replicas(2)), "is distributed already"),
    ],
)
def test_what_is_no_data_set_of_batches_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(errors.BadRequest, match=says):
        any_distribute(dataset, replicas(2))


def test_batches_smaller_than_the_replicas_are_refused() -> None:
    with pytest.raises(errors.InvalidData, match="a batch has 2 samples, but 3 replicas share it"):
        distribute(from_arrays(TEN).batch(2), replicas(3))


def test_batches_of_arrays_of_different_lengths_are_refused() -> None:
    ragged: Sequence[Any] = [(TEN, TEN[:4])]
    with pytest.raises(errors.InvalidData, match=r"arrays of the lengths \[4, 10\]"):
        list(distribute(ragged, replicas(2)))

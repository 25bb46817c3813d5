"""Lazy pipelines: the stages, their order and seeds, what they compute and when, and the shares of processes."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from shoal import errors
from shoal.data import (
    AUTOTUNE,
    Arrays,
    Augmented,
    AutoShardPolicy,
    Csv,
    DataPipeline,
    Options,
    Parquet,
    Seekable,
    from_arrays,
    from_generator,
    pipeline,
)
from shoal.data._pipeline import shard
from shoal.data.augment import Augmentation, Flip
from support import waiting

TEN = np.arange(10)
any_pipeline: Callable[..., Any] = pipeline
any_from_generator: Callable[..., Any] = from_generator


def lists(dataset: DataPipeline) -> list[Any]:
    return [np.asarray(it).tolist() for it in dataset]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


def numbers(dataset: DataPipeline) -> list[int]:
    return [int(it) for it in dataset]


def with_policy(dataset: DataPipeline, policy: AutoShardPolicy) -> DataPipeline:
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


# Stages.


def test_elements_have_the_structure_of_the_arrays() -> None:
    assert lists(from_arrays(TEN[:3])) == [0, 1, 2]
    [(x, y), *_] = from_arrays(np.ones((2, 4)), TEN[:2])
    assert (x.shape, y) == ((4,), 0)
    [row, _] = from_arrays({"x": np.ones((2, 4)), "y": TEN[:2]})
    assert (row["x"].shape, row["y"]) == ((4,), 0)


def test_map_gives_the_items_of_a_tuple_as_arguments() -> None:
    assert lists(from_arrays(TEN[:3], TEN[:3]).map(lambda a, b: a + b)) == [0, 2, 4]
    assert lists(from_arrays({"a": TEN[:3]}).map(lambda row: row["a"] + 1)) == [1, 2, 3]
    assert lists(from_arrays(TEN[:4]).batch(2).map(lambda batch: batch.sum())) == [1, 5]


def test_batches_have_a_first_dimension() -> None:
    dataset = from_arrays(TEN, TEN * 1.5).map(lambda a, b: {"a": a, "pair": [b, b]})
    batches = list(dataset.batch(4))
    assert [len(it["a"]) for it in batches] == [4, 4, 2]
    assert batches[0]["pair"][1].tolist() == [0, 1.5, 3, 4.5]
    assert [len(it["a"]) for it in dataset.batch(4, drop_remainder=True)] == [4, 4]
    assert lists(from_arrays(TEN[:4]).batch(2).batch(2)) == [[[0, 1], [2, 3]]]


def test_repeat_take_skip_and_shard() -> None:
    three = from_arrays(TEN[:3])
    assert lists(three.repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert lists(three.repeat().take(4)) == lists(three.repeat(-1).take(4)) == [0, 1, 2, 0]
    assert lists(three.repeat(0)) == lists(three.take(0)) == lists(three.skip(3).repeat()) == []
    assert lists(three.skip(2)) == [2]
    assert lists(three.take(-1)) == [0, 1, 2]
    assert lists(from_arrays(TEN).shard(3, 1)) == [1, 4, 7]


def test_length_is_known_where_it_can_be() -> None:
    ten = from_arrays(TEN)
    lengths = [
        (ten.map(abs).shuffle(3).prefetch(1), 10),
        (ten.batch(4), 3),
        (ten.batch(4, drop_remainder=True), 2),
        (ten.repeat(3).batch(4), 8),
        (ten.repeat().take(7), 7),
        (ten.skip(12), 0),
        (ten.shard(3, 0), 4),
        (ten.shard(3, 1), 3),
        (ten.repeat(0), 0),
    ]
    for dataset, length in lengths:
        assert len(dataset) == length == len(list(dataset))
    with pytest.raises(TypeError, match=r"infinite; limit it with take\(n\)"):
        len(ten.repeat().batch(2))
    with pytest.raises(TypeError, match="unknown"):
        len(from_generator(lambda: [1]).repeat(2))
    assert from_generator(lambda: []), "a pipeline is true"


def test_generator_is_called_for_each_iteration() -> None:
    dataset = from_generator(lambda: ((number, number * 2) for number in range(3)))
    assert lists(dataset) == lists(dataset) == [[0, 0], [1, 2], [2, 4]]
    assert [batch[1].tolist() for batch in dataset.batch(2)] == [[0, 2], [4]]


# Order.


def test_shuffle_has_a_new_order_in_each_iteration_and_the_same_in_each_run() -> None:
    def orders(**settings: Any) -> list[list[int]]:
        dataset = from_arrays(TEN).shuffle(10, **settings)
        return [numbers(dataset) for _ in range(3)]

    first = orders(seed=7)
    assert first == orders(seed=7) != orders(seed=8)
    assert orders() == orders(), "without a seed, all processes have the same order"
    assert all(sorted(order) == TEN.tolist() for order in first)
    assert len({*map(tuple, first)}) == 3
    assert len({*map(tuple, orders(seed=7, reshuffle_each_iteration=False))}) == 1
    repeated = numbers(from_arrays(TEN).shuffle(10, seed=7).repeat(2))
    assert [repeated[:10], repeated[10:]] == first[:2]


def test_shuffle_draws_each_element_from_its_buffer() -> None:
    order = numbers(from_arrays(np.arange(1000)).shuffle(10, seed=1))
    assert sorted(order) == list(range(1000))
    assert all(number < place + 10 for place, number in enumerate(order))
    assert numbers(from_arrays(TEN).shuffle(1)) == TEN.tolist()
    places = [numbers(from_arrays(TEN).shuffle(10, seed=seed)).index(3) for seed in range(200)]
    assert all(places.count(place) >= 5 for place in range(10)), "each place is about equally likely"


# What is computed, and when.


class Counted:
    """A data set that records what is read."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.read: list[list[int]] = []

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: np.ndarray) -> np.ndarray:
        self.read.append(indices.tolist())
        return indices * 10


def test_nothing_is_read_before_it_is_needed() -> None:
    source = Counted(100)
    iterator = iter(pipeline(source).map(lambda it: it + 1).shuffle(100).batch(4))
    assert source.read == []
    next(iterator)
    assert [len(it) for it in source.read] == [4], "one read for the samples of a batch, and none for the buffer"


def test_samples_that_no_function_changes_are_read_as_batches() -> None:
    source = Counted(8)
    assert lists(pipeline(source).shuffle(8, seed=3).batch(3).take(2)) == [
        [it * 10 for it in read] for read in source.read
    ]
    assert [len(read) for read in source.read] == [3, 3]


def test_function_is_not_called_for_elements_that_are_left_out() -> None:
    called: list[int] = []

    def noted(it: np.int64) -> np.int64:
        called.append(int(it))
        return it

    mapped = from_arrays(TEN).map(noted)
    assert lists(mapped.skip(6).shard(2, 0)) == called == [6, 8]
    called.clear()
    assert lists(shard(mapped.batch(4).prefetch(2), 2, 1)) == [[2, 3], [6, 7], [9]]
    assert called == [2, 3, 6, 7, 9], "the other process computes the other parts"


@pytest.mark.parametrize("threads", [2, AUTOTUNE])
def test_parallel_calls_keep_the_order(threads: int) -> None:
    here = from_arrays(TEN).map(lambda it: it * 2, num_parallel_calls=threads)
    assert lists(here.batch(4)) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


def test_parallel_calls_run_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)

    def meet(it: np.int64) -> np.int64:
        together.wait()
        return it

    assert lists(from_arrays(TEN[:2]).map(meet, num_parallel_calls=2).batch(2)) == [[0, 1]]


def test_prefetch_computes_ahead_in_one_thread_that_ends_with_the_iteration() -> None:
    ahead = threading.Semaphore(0)

    def noted(it: np.int64) -> np.int64:
        ahead.release()
        return it

    dataset = from_arrays(TEN).map(noted).prefetch(2)
    iterator = iter(dataset)
    assert not readers(), "it begins with the first element"
    assert next(iterator) == 0
    assert all(ahead.acquire(timeout=20) for _ in range(3))
    assert len(readers()) == 1
    del iterator
    gc.collect()
    waiting.wait_until(lambda: not readers(), what="the end of the thread")
    assert lists(dataset) == lists(from_arrays(TEN).prefetch(AUTOTUNE)) == lists(dataset.prefetch(0)) == TEN.tolist()
    assert not readers()


def test_error_of_a_function_reaches_the_loop() -> None:
    iterator = iter(from_arrays(TEN).map(lambda it: 1 // (3 - int(it))).prefetch(4))
    assert [next(iterator) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(iterator)


# Sources.


def test_data_sets_with_seeds_draw_new_numbers_in_each_iteration() -> None:
    images = np.arange(64, dtype=np.uint8).reshape(16, 2, 2, 1)
    augmented = Augmented(Arrays((images, np.arange(16))), Augmentation(Flip()))

    def two(seed: int) -> list[Any]:
        dataset = pipeline(augmented, seed=seed).batch(16)
        return [next(iter(dataset))[0].tolist() for _ in range(2)]

    first, second = two(0)
    assert first != second
    assert two(0) == [first, second] != two(1)


def files_of(folder: Path, count: int) -> list[str]:
    for number in range(count):
        rows = np.arange(3) + 3 * number
        pa.parquet.write_table(pa.table({"x": rows, "s": [str(it) for it in rows]}), folder / f"{number}.parquet")
        (folder / f"{number}.csv").write_text("x\n" + "".join(f"{it}\n" for it in rows))
    return [str(folder / f"{number}.parquet") for number in range(count)]


def test_data_sets_in_blocks_are_read_in_order(tmp_path: Path) -> None:
    rows = pipeline(Parquet(files_of(tmp_path, 3)))
    assert [(int(row["x"]), row["s"]) for row in rows] == [(number, str(number)) for number in range(9)]
    assert [batch["x"].tolist() for batch in rows.batch(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert lists(pipeline(Seekable(Thousand(), block=100)).batch(300).map(len)) == [300, 300, 300, 100]


class Thousand:
    def __len__(self) -> int:
        return 1000

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)


# Shares of processes.


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_parts_of_processes_make_up_each_batch(processes: int, replicas: int) -> None:
    whole = lists(from_arrays(TEN).shuffle(10, seed=2).batch(7))
    dataset = from_arrays(TEN).shuffle(10, seed=2).batch(7)
    parts = [lists(shard(dataset, processes, process, replicas)) for process in range(processes)]
    assert [joined(step) for step in zip(*parts, strict=True)] == whole
    for step in zip(*parts, strict=True):
        sizes = [len(part) for part in step]
        assert max(sizes) - min(sizes) <= replicas


def test_a_batch_with_too_few_samples_gives_parts_without_samples() -> None:
    dataset = from_arrays(np.zeros((5, 2))).map(lambda it: it).batch(4)
    assert [[it.shape for it in shard(dataset, 4, process)] for process in range(4)] == [[(1, 2), (1, 2)]] + [
        [(1, 2), (0, 2)]
    ] * 3
    mapped = dataset.map(lambda it: it + 1)
    assert [it.shape for it in shard(mapped, 4, 3)] == [(1, 2), (0, 2)]


def test_off_gives_each_process_all_data() -> None:
    dataset = with_policy(from_arrays(TEN).batch(5).prefetch(1), AutoShardPolicy.OFF)
    parts = [lists(shard(dataset, 2, process)) for process in range(2)]
    assert [sorted(joined(part)) for part in parts] == [TEN.tolist()] * 2
    assert [len(a) + len(b) for a, b in zip(*parts, strict=True)] == [5] * 4
    assert len(shard(dataset, 2, 0)) == 4


@pytest.mark.parametrize("kind", [Parquet, Csv])
def test_file_gives_each_process_some_files(tmp_path: Path, kind: Callable[[str], Parquet | Csv]) -> None:
    files_of(tmp_path, 5)
    dataset = pipeline(kind(str(tmp_path))).map(lambda row: row["x"]).batch(2)
    for policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
        parts = [shard(with_policy(dataset, policy), 2, process) for process in range(2)]
        seen = [sorted(int(it) for batch in part for it in batch) for part in parts]
        assert seen == [[0, 1, 2, 6, 7, 8, 12, 13, 14], [3, 4, 5, 9, 10, 11]]


def test_auto_divides_batches_if_there_are_too_few_files(tmp_path: Path) -> None:
    files_of(tmp_path, 2)
    dataset = pipeline(Csv(str(tmp_path))).map(lambda row: row["x"]).batch(3)
    assert [lists(shard(dataset, 3, process)) for process in range(3)] == [[[0], [3]], [[1], [4]], [[2], [5]]]
    with pytest.raises(errors.InvalidData, match="has 2 files, which are too few for 3 processes; use AutoShardPolicy"):
        shard(with_policy(dataset, AutoShardPolicy.FILE), 3, 0)
    with pytest.raises(errors.InvalidData, match="does not read files"):
        shard(with_policy(from_arrays(TEN).batch(4), AutoShardPolicy.FILE), 2, 0)


def test_processes_may_have_different_numbers_of_replicas() -> None:
    dataset = from_arrays(TEN).batch(5)
    parts = [shard(dataset, 2, it, (1, 3)[it], first=it, in_sync=4) for it in range(2)]
    assert [lists(part) for part in parts] == [[[0, 1], [5, 6]], [[2, 3, 4], [7, 8, 9]]]


def test_processes_that_are_not_in_sync_get_whole_batches() -> None:
    dataset = from_arrays(TEN).batch(2).prefetch(2)
    parts = [shard(dataset, 2, it, in_sync=1) for it in range(2)]
    assert [lists(part) for part in parts] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert len(lists(shard(with_policy(dataset, AutoShardPolicy.OFF), 2, 1, in_sync=1))) == 5


def test_share_has_an_order_of_its_own() -> None:
    """Iterating the pipeline itself, as one process may do to look at its data, changes no process's order."""
    dataset = from_arrays(TEN).shuffle(10).batch(2)
    list(dataset)
    looked, not_looked = shard(dataset, 2, 0), shard(from_arrays(TEN).shuffle(10).batch(2), 2, 0)
    assert lists(looked) == lists(not_looked)


# Bad input.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: from_arrays(TEN).batch(0), "batch_size is 0; it must be a whole number, 1 or more"),
        (lambda: from_arrays(TEN).shuffle(0), "buffer_size is 0"),
        (lambda: from_arrays(TEN).shard(2, 2), "index is 2, but there are 2 shards"),
        (lambda: from_arrays(TEN).prefetch(-2), "buffer_size is -2"),
        (lambda: any_pipeline(TEN), r"give a data set, such as shoal.data.Cifar10\(FOLDER\)"),
        (lambda: any_pipeline(from_arrays(TEN)), "give a data set"),
        (lambda: any_from_generator([1]), "give a function that returns an iterable"),
        (lambda: from_arrays(TEN).map(any_pipeline.__doc__), "give a function of one element"),  # type: ignore[arg-type]
        (lambda: shard(from_arrays(TEN).batch(4), 2, 2), "process is 2, but there are 2 processes"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(errors.BadRequest, match=says):
        make()


def test_samples_that_do_not_fit_into_a_batch_are_named() -> None:
    ragged = from_generator(lambda: iter([np.zeros(2), np.zeros(3)]))
    with pytest.raises(errors.InvalidData, match=r"have the shapes \(2,\), \(3,\); make them alike with map"):
        list(ragged.batch(2))
    mixed = from_generator(lambda: iter([{"a": 1}, {"b": 1}]))
    with pytest.raises(errors.InvalidData, match=r"differ in their structure \(KeyError: 'a'\)"):
        list(mixed.batch(2))


def test_batches_that_are_smaller_than_the_replicas_are_refused() -> None:
    says = r"a batch has 3 samples, but 4 replicas share it; give batch\(n\) with n of at least 4"
    with pytest.raises(errors.InvalidData, match=says):
        shard(from_arrays(TEN).batch(3).repeat(2).prefetch(1), 2, 0, 2)
    scalars = from_generator(lambda: iter([1.0]))
    with pytest.raises(errors.InvalidData, match=r"contains a float without a first dimension.*call batch\(n\) first"):
        list(shard(scalars, 2, 0))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    waiting.wait_until(lambda: not readers(), what="the end of all threads that read")

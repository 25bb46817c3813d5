"""Names of tf.distribute that strategies, replica contexts and iterators share."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal.data import from_arrays
from shoal_distribute import (
    CentralStorageStrategy,
    ClusterSpec,
    DistributedIterator,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    SimpleClusterResolver,
    Strategy,
    TFConfigClusterResolver,
    get_replica_context,
    keras,
)
from shoal_distribute.experimental import ValueContext


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    made = MirroredStrategy(["/cpu:0", "/cpu:1"][: request.param])
    yield made
    made.close()


def test_each_replica_gets_a_value_of_its_own(strategy: Strategy) -> None:
    def make(context: ValueContext) -> np.ndarray:
        return np.array([context.replica_id_in_sync_group, context.num_replicas_in_sync])

    values = strategy.experimental_distribute_values_from_function(make)
    found = strategy.experimental_local_results(strategy.run(lambda value: str(value.tolist()), (values,)))
    assert list(found) == [
        str([number, strategy.num_replicas_in_sync]) for number in range(strategy.num_replicas_in_sync)
    ]


def test_all_gather_joins_the_arrays_of_all_replicas(strategy: Strategy) -> None:
    def step() -> Any:
        replica = get_replica_context()
        assert replica
        own = np.full((replica.local_replica + 1, 2), replica.local_replica)  # another length in each replica
        with pytest.raises(errors.InvalidShape, match="along axis 2"):
            replica.all_gather(own, 2)
        return replica.all_gather({"a": own, "b": [own]}, axis=0)

    whole = [[0, 0], [1, 1], [1, 1]][: 2 * strategy.num_replicas_in_sync - 1]
    found = strategy.run(step)
    for each in strategy.experimental_local_results(found["a"]) + strategy.experimental_local_results(found["b"][0]):
        assert each.tolist() == whole


def test_get_next_is_next(strategy: Strategy) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(from_arrays(np.arange(4)).batch(2)))
    assert isinstance(iterator, DistributedIterator)
    first, second = iterator.get_next(), next(iterator)
    joined = [strategy.gather(it, axis=0).tolist() for it in (first, second)]
    assert joined == [[0, 1], [2, 3]]
    with pytest.raises(StopIteration):
        iterator.get_next()
    assert isinstance(first, PerReplica if strategy.num_replicas_in_sync > 1 else np.ndarray)


@pytest.mark.parametrize("kind", [MirroredStrategy, CentralStorageStrategy])
@pytest.mark.parametrize("devices", [["/cpu:0"], ["/cpu:0", "/cpu:1"]], ids=["one", "two"])
def test_local_strategies_tell_how_long_their_replicas_join_gradients(kind: Any, devices: list[str]) -> None:
    with kind(devices) as strategy, strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=2, verbose=0)
        (times,) = strategy.timings().ranks
    assert (times.steps, times.calls, times.wait) == (4, 0, 0.0)
    assert (0 < times.local_reduce < times.seconds) == (len(devices) == 2)
    assert "local reduce" in str(strategy.timings())


def test_the_resolver_of_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    given = SimpleClusterResolver(ClusterSpec({}))
    assert OneDeviceStrategy("/cpu:0").cluster_resolver is None
    assert MultiWorkerMirroredStrategy(given, devices=["/cpu:0"]).cluster_resolver is given
    assert isinstance(MultiWorkerMirroredStrategy(devices=["/cpu:0"]).cluster_resolver, TFConfigClusterResolver)

"""ClusterCoordinator in a process without workers, and its checks of arguments."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal.data import from_arrays
from shoal_distribute import (
    ClusterCoordinator,
    DistributedIterator,
    MirroredStrategy,
    ParameterServerStrategy,
    get_strategy,
    keras,
)

NO_CLIENT = cast(shoal.Client, object())  # no session opens, because there is no optimizer


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    strategy = ParameterServerStrategy(client=NO_CLIENT, job="alone", devices=["/cpu:0"])
    made = ClusterCoordinator(strategy)
    yield made
    made.close()
    strategy.close()


def test_functions_run_in_the_scope_with_their_own_values(coordinator: ClusterCoordinator) -> None:
    def step(batches: list[DistributedIterator], *, factor: int) -> dict[str, Any]:
        assert get_strategy() is coordinator.strategy
        return {"sum": batches[0].get_next().sum() * factor, "name": "a"}

    for given in (from_arrays(np.arange(4)).batch(2), lambda: from_arrays(np.arange(4)).batch(2)):
        batches = iter(coordinator.create_per_worker_dataset(given))
        values = [coordinator.schedule(step, ([batches],), {"factor": 10}) for _ in range(2)]
        coordinator.join()
        assert coordinator.done()
        assert coordinator.fetch({"all": values, "more": (1, values[0])}) == {
            "all": [{"sum": 10, "name": "a"}, {"sum": 50, "name": "a"}],
            "more": (1, {"sum": 10, "name": "a"}),
        }
        assert values[0].get() == values[0].fetch()
        coordinator.schedule(step, ([batches],), {"factor": 1})
        with pytest.raises(
            errors.ProgramError, match=r"step\) failed on this process: StopIteration \(its data set has no"
        ):
            coordinator.done()
        with pytest.raises(errors.WrongContext, match=r"call next\(\) within the function"):
            batches.get_next()


def test_fit_beside_a_coordinator_says_what_to_do(coordinator: ClusterCoordinator) -> None:
    with coordinator.strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(errors.WrongContext, match=r"leave it out, or schedule a function that calls .*train_on_batch"):
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)))


def test_an_interrupted_function_does_not_stay(coordinator: ClusterCoordinator) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinator.schedule(interrupted)
    coordinator.join()
    assert coordinator.schedule(lambda: 3).fetch() == 3


def test_wrong_arguments_say_what_to_give(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(errors.BadRequest, match="a int is scheduled; give a function"):
        coordinator.schedule(cast(Any, 3))
    with pytest.raises(errors.BadRequest, match="is not the data set of each worker"):
        coordinator.create_per_worker_dataset(iter([1]))
    coordinator.schedule(lambda value: value, (coordinator.schedule(lambda: 1),))
    with pytest.raises(errors.ProgramError, match=r"give its fetch\(\) instead"):
        coordinator.join()
    coordinator.schedule(lambda: coordinator.schedule(lambda: 1))
    with pytest.raises(errors.ProgramError, match="a scheduled function calls schedule"):
        coordinator.join()
    with pytest.raises(errors.WrongContext, match="has a ClusterCoordinator already"):
        ClusterCoordinator(coordinator.strategy)


def test_the_end_of_a_with_block_says_whether_the_script_failed() -> None:
    ends: list[bool] = []

    class Recorded(ClusterCoordinator):
        def close(self, *, failed: bool = False) -> None:
            ends.append(failed)
            super().close(failed=failed)

    for ending in (None, SystemExit(0), SystemExit(1), ValueError()):
        given = ParameterServerStrategy(client=NO_CLIENT, job="a", devices=["/cpu:0"])
        with contextlib.suppress(SystemExit, ValueError), given as strategy, Recorded(strategy):
            if ending:
                raise ending
    assert ends == [False, False, True, True]


def test_strategies_that_cannot_schedule_say_why() -> None:
    with pytest.raises(errors.BadRequest, match="needs a ParameterServerStrategy, not a MirroredStrategy"):
        ClusterCoordinator(cast(Any, MirroredStrategy(["/cpu:0"])))
    together = ParameterServerStrategy(client=NO_CLIENT, job="a", devices=["/cpu:0"], consistency=shoal.Synchronous())
    with pytest.raises(errors.BadRequest, match=r"the consistency is Synchronous, .* which only Asynchronous allows"):
        ClusterCoordinator(together)
    several = ParameterServerStrategy(client=NO_CLIENT, job="b", devices=["/cpu:0"], workers=2)
    with pytest.raises(errors.BadRequest, match="has 2 workers, but nothing says where they are; set TF_CONFIG"):
        ClusterCoordinator(several)
    for strategy in (together, several):
        strategy.close()

"""Mistakes by which the ranks of a MultiWorkerMirroredStrategy differ. Each one is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import Group, MultiWorkerMirroredStrategy, keras
from support.ranks import run_ranks

RANKS = 2
X, Y = np.ones((8, 2), np.float32), np.ones(8, np.float32)
Work = Callable[[keras.Model, int], Any]


def failures(work: Work) -> list[BaseException]:
    """Returns the errors of all ranks, which call a function with a model and their number."""

    def run(group: Group) -> Any:
        strategy = MultiWorkerMirroredStrategy(devices=["/cpu:0"], group=group)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="last")], name="line")
            model.compile("sgd", "mse")
        return work(model, group.rank)

    results = run_ranks(RANKS, run)
    assert all(isinstance(it, errors.RanksDisagree) for it in results), results
    return [it for it in results if isinstance(it, BaseException)]


def test_a_backup_that_only_one_rank_has(tmp_path: Path) -> None:
    def fail(epoch: int, _logs: Any) -> None:
        if epoch == 1:
            raise RuntimeError("the machine is gone")

    def work(model: keras.Model, rank: int) -> None:
        backup = keras.callbacks.BackupAndRestore(tmp_path / str(rank))
        failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
        with pytest.raises(RuntimeError):
            model.fit(X, Y, epochs=3, verbose=0, callbacks=[failing, backup])
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[backup])

    for error in failures(work):
        assert "rank 1 has no checkpoint of epoch 1 in its backup_dir, from which rank 0 continues" in str(error)
        assert "a shared folder" in str(error)


def test_values_that_one_rank_has_set() -> None:
    def work(model: keras.Model, rank: int) -> None:
        model.fit(X, Y, verbose=0)
        if rank == 1:
            model.set_weights([it + 1 for it in model.get_weights()])
        model.fit(X, Y, verbose=0)

    for error in failures(work):
        assert "rank 1 has other values of the variables than rank 0" in str(error)


@pytest.mark.parametrize("mistake", ["batch_size", "evaluate"])
def test_calls_that_only_one_rank_makes(mistake: str) -> None:
    def work(model: keras.Model, rank: int) -> None:
        if mistake == "evaluate" and rank == 0:
            model.evaluate(X, Y, verbose=0)
        size = 4 if mistake == "batch_size" and rank == 1 else 8
        model.fit(X, Y, batch_size=size, verbose=0)

    for error in failures(work):
        assert "fit got another batch_size or number of samples in one rank, or one rank alone calls evalu" in str(
            error
        )

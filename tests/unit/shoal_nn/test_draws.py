"""Random draws of layers on a GPU, with a stand-in for CuPy."""

import sys

import numpy as np
import pytest

from shoal_nn import Dropout, TrainingContext
from support.devices.fake_cupy import FakeArray, fake_cupy


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())


def dropped(seed: int, path: str) -> np.ndarray:
    y, _, pullback = Dropout(0.25).apply(
        {}, {}, np.ones((40, 50), np.float32).view(FakeArray), TrainingContext(seed, path)
    )
    assert isinstance(y, FakeArray)
    _, dx = pullback(np.ones((40, 50), np.float32).view(FakeArray))
    np.testing.assert_array_equal(dx, y)
    return np.asarray(y)


def test_dropout_follows_from_the_seed_and_the_path() -> None:
    first = dropped(7, "a")
    assert set(np.unique(first)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.05)
    np.testing.assert_array_equal(first, dropped(7, "a"))
    assert (first != dropped(7, "b")).any()
    assert (first != dropped(8, "a")).any()

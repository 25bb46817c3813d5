"""Sessions with trees of arrays against real servers. The test plays the coordinator."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import shoal
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers
from support.clusters.variable_tree import Layer, check_same, leaves, tree


@pytest.fixture
def session() -> Iterator[shoal.Session]:
    with (
        FakeCoordinator() as coordinator,
        ShardServers({name: np.array(it, order="C") for name, it in leaves(tree()).items()}) as servers,
        shoal.Client(coordinator.address, retry_for_s=5) as client,
    ):
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        with client.session("job", variables=tree(), worker="me", optimizer=shoal.optim.SGD(1.0)) as session:
            yield session


def test_a_tree_comes_back_with_its_structure_dtypes_and_bits(session: shoal.Session) -> None:
    pulled, given = session.pull(), tree()
    assert type(pulled["layers"]) is list
    assert [type(layer) for layer in pulled["layers"]] == [Layer, Layer]
    assert type(pulled["scale"]) is tuple
    assert pulled["none"] is None
    assert list(pulled) == list(given)
    check_same(pulled, given)


def test_gradients_may_have_the_same_structure(session: shoal.Session) -> None:
    before = session.pull()
    ones = [Layer(np.ones((4, 3), np.float32), np.ones(8)[::2]), Layer(np.ones(4), np.ones((2, 2), ml_dtypes.bfloat16))]
    gradients = {"layers": ones, "scale": (1.0, None, np.float16(1)), "none": None}
    assert session.push(gradients, updates={"count": np.array([7, 8, 9])}).outcome == "accepted"
    after = session.pull()
    np.testing.assert_array_equal(after["layers"][0].kernel, before["layers"][0].kernel - 1)
    np.testing.assert_array_equal(after["scale"], [0.5, 2.5, 2.5])
    np.testing.assert_array_equal(after["count"], [7, 8, 9])


def test_gradients_may_be_named_by_key_path(session: shoal.Session) -> None:
    before = session.pull()
    gradients = {name: np.zeros(it.shape, it.dtype) for name, it in leaves(before).items() if name != "count"}
    gradients["scale/1"] += 1
    session.push(gradients)
    assert session.pull()["scale"][1] == 1.5


def test_a_wrong_tree_is_refused_by_key_path(session: shoal.Session) -> None:
    with pytest.raises(shoal.InvalidGradient, match=r"'layers/0/kernel' is missing.*'extra/w' is not a variable"):
        session.push({"extra": {"w": np.ones(3)}, "scale": (1.0, 1.0, 1.0)})

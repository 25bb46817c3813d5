"""Trees of JAX and Flax through a server: the same structure, dtypes and bits come out."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shoal
from support.clusters.local import local_cluster

jax = pytest.importorskip("jax", reason="JAX is not installed: `make reference` does that")
nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed: `make reference` does that")


@pytest.fixture(scope="module")
def client() -> Iterator[shoal.Client]:
    """Yields a client of a cluster with two servers."""
    with local_cluster(servers=2, workers=0) as cluster, cluster.client() as client:
        yield client


def model(seed: int = 0) -> Any:
    """Returns a model whose state is nested, and has arrays of several dtypes."""

    class Model(nnx.Module):  # type: ignore[misc, name-defined]  # of a package that is not always installed
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), nnx.Linear(4, 1, rngs=nnx.Rngs(seed + 1))])
            self.scale = nnx.Param(jax.numpy.full((2, 3), 0.3, "bfloat16"))

        def __call__(self, x: Any) -> Any:
            hidden = jax.numpy.tanh(self.layers[0](x * self.scale[...].sum().astype("float32")))
            return self.layers[1](hidden)

    return Model()


def check_same(got: Any, expected: Any) -> None:
    """Asserts that two trees have the same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_dict_of_jax_arrays_comes_back_as_it_was(client: shoal.Client) -> None:
    keys = jax.random.split(jax.random.key(3), 3)
    given = {
        "layers": [{"w": jax.random.normal(keys[0], (3, 4))}, {"w": jax.random.normal(keys[1], (4,), "bfloat16")}],
        "scale": (jax.numpy.float32(0.1), jax.random.normal(keys[2], (2, 1), "float16")),
    }
    with client.session("dict", variables=given, optimizer=shoal.optim.SGD(1.0)) as session:
        values = session.pull()
        check_same(values, given)
        session.push(jax.tree.map(jax.numpy.ones_like, given))
        after = session.pull()
    assert jax.tree.structure(after) == jax.tree.structure(given)
    check_same(after["layers"][0], {"w": given["layers"][0]["w"] - 1})


def test_the_state_of_a_flax_model_is_trained_by_the_documented_recipe(client: shoal.Client) -> None:
    own, x = model(), jax.numpy.linspace(-1, 1, 6).reshape(2, 3)
    state = nnx.state(own, nnx.Param)
    other = model(seed=5)
    with client.session("nnx", variables=state, optimizer=shoal.optim.SGD(1.0)) as session:
        values = session.pull()
        check_same(values, state)
        nnx.update(other, values)
        check_same(nnx.state(other, nnx.Param), state)
        _, gradients = nnx.value_and_grad(lambda it: (it(x) ** 2).mean())(other)
        session.push(gradients)
        nnx.update(other, session.pull())
    kernels = [it["layers"][0]["kernel"][...] for it in (nnx.state(other, nnx.Param), state, gradients)]
    assert np.asarray(kernels[0]).tobytes() == (np.asarray(kernels[1]) - np.asarray(kernels[2])).tobytes()
    assert np.any(np.asarray(kernels[2]))

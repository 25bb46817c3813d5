"""`shoal.jax.DistributedOptimizer`: the results of optax, memory, and what it refuses."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shoal
import shoal.jax
from shoal import errors, optim
from shoal.jax._trees import to_jax

_names = count()


class TrainState(NamedTuple):
    """As that of Flax."""

    params: dict[str, Any]
    opt_state: dict[str, Any]


def name() -> str:
    return f"jax-{next(_names)}"


def parameters() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = {"w": jax.random.normal(keys[0], (5, 8)), "b": jnp.zeros(8)}
    return {"hidden": hidden, "out": jax.random.normal(keys[1], (8,))}


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(step), (8, 5))
    return x, x.sum(axis=1)


def loss_of(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return ((hidden @ params["out"] - y) ** 2).mean()


gradients_of = jax.jit(jax.grad(loss_of))


def together(work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return [*pool.map(work, range(2))]


def part(step: int, rank: int) -> list[jax.Array]:
    return [it[4 * rank : 4 * rank + 4] for it in batch(step)]


def test_two_synchronous_workers_equal_one_process(client: shoal.Client) -> None:
    plain, wanted = optax.adam(1e-2), parameters()
    state = plain.init(wanted)
    for step in range(20):
        updates, state = plain.update(gradients_of(wanted, *batch(step)), state)
        wanted = optax.apply_updates(wanted, updates)
    job = name()

    def work(_: int) -> Any:
        params = parameters()
        with shoal.jax.DistributedOptimizer(params, optim.Adam(1e-2), job=job, workers=2, client=client) as it:
            for step in range(20):
                params = it.update(params, gradients_of(params, *part(step, it.session.rank)), metrics={"loss": 1.0})
        return params

    for found in together(work):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_a_module_of_flax_is_changed_in_place(client: shoal.Client) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.linear, self.norm = nnx.Linear(5, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(self.norm(x))[:, 0]

    def squares(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((model(x) - y) ** 2).mean()

    step_of = nnx.jit(nnx.value_and_grad(squares))
    model, plain = Net(), Net()
    reference = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    with shoal.jax.DistributedOptimizer(model, optim.SGD(0.1), job=name(), client=client) as it:
        for step in range(5):
            loss, gradients = step_of(model, *batch(step))
            wanted, expected = step_of(plain, *batch(step))
            reference.update(plain, expected)
            assert it.update(model, gradients) is model
            np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    one, other = nnx.state(model, nnx.Param), nnx.state(plain, nnx.Param)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)


def test_arrays_share_memory_if_it_is_aligned() -> None:
    memory = np.zeros(4096, np.uint8)
    start = -memory.ctypes.data % 64
    aligned, other = (memory[start + by : start + by + 400].view(np.float32) for by in (0, 4))
    assert to_jax(aligned).unsafe_buffer_pointer() == aligned.ctypes.data
    assert to_jax(other).unsafe_buffer_pointer() != other.ctypes.data
    assert to_jax(other).tolist() == other.tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_arrays_of_earlier_steps_keep_their_values(client: shoal.Client, overlap: bool) -> None:
    """JAX shares memory with the arrays of a pull, so a later pull must not write there."""
    params: Any = {"w": jnp.zeros((100, 64)), "b": [jnp.zeros(64), jnp.zeros(())]}
    options: dict[str, Any] = {"consistency": shoal.Asynchronous(), "overlap": overlap, "client": client}
    steps, kept = 40, []
    with shoal.jax.DistributedOptimizer(params, optim.SGD(1.0), job=name(), **options) as it:
        assert it.session.overlap is overlap
        for step in range(steps):
            params = it.update(params, jax.tree.map(lambda each, by=step: jnp.full_like(each, -by), params))
            kept.append((params, jax.tree.map(np.array, params)))
        it.session.settle()
        params = it.pull(params)
    for each, copies in kept:
        jax.tree.map(np.testing.assert_array_equal, each, copies)
    assert all((each == sum(range(steps))).all() for each in jax.tree.leaves(params))


def test_halves_train(client: shoal.Client) -> None:
    params = {"w": jnp.ones((64, 3), jnp.bfloat16), "b": jnp.ones(2, jnp.float16)}
    with shoal.jax.DistributedOptimizer(params, optim.SGD(2.0**-10), job=name(), client=client) as it:
        for _ in range(64):
            params = it.update(params, jax.tree.map(jnp.ones_like, params))
    assert {key: each.dtype for key, each in params.items()} == {"w": jnp.bfloat16, "b": jnp.float16}
    assert all((each == 1 - 2.0**-4).all() for each in params.values())


def test_arrays_keep_their_shardings(client: shoal.Client) -> None:
    mesh = jax.make_mesh((1,), ("rows",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    params = {"w": jax.device_put(jnp.zeros((64, 2)), sharding)}
    with shoal.jax.DistributedOptimizer(params, optim.SGD(1.0), job=name(), client=client) as it:
        params = it.update(params, {"w": jnp.ones((64, 2))})
    assert params["w"].sharding == sharding
    assert (params["w"] == -1).all()


def test_some_variables_of_a_module(client: shoal.Client) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.body, self.head = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))

    def squares(model: Net, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((model.head(model.body(x))[:, 0] - y) ** 2).mean()

    model, head = Net(), nnx.All(nnx.Param, nnx.PathContains("head"))
    body, before = jnp.array(model.body.kernel[...]), jnp.array(model.head.kernel[...])
    with shoal.jax.DistributedOptimizer(model, optim.SGD(0.1), wrt=head, job=name(), client=client) as it:
        it.update(model, nnx.grad(squares, argnums=nnx.DiffState(0, head))(model, *batch(0)))
        assert sorted(it.session.pull()["head"]) == ["bias", "kernel"]
    assert (model.body.kernel[...] == body).all()
    assert not (model.head.kernel[...] == before).all()


def test_batches_are_those_of_one_epoch(client: shoal.Client) -> None:
    job, epochs = name(), list[list[int]]()
    with shoal.jax.DistributedOptimizer(
        parameters(), optim.SGD(0.1), job=job, client=client, epochs=2, batch_size=4
    ) as it:
        params = it.pull(parameters())
        for _ in range(2):
            epochs.append([])
            for numbers in it.batches(10):
                epochs[-1] += numbers.tolist()
                params = it.update(params, gradients_of(params, *batch(0)))
        assert [*it.batches(10)] == []
    assert [sorted(each) for each in epochs] == [[*range(10)]] * 2
    assert client.job(job).status().progress.samples == 20


class TestIsRefused:
    def test_an_update_inside_a_compiled_function(self, client: shoal.Client) -> None:
        params = parameters()
        with shoal.jax.DistributedOptimizer(params, optim.SGD(0.1), job=name(), client=client) as it:

            def step(params: Any) -> Any:
                return it.update(params, jax.grad(loss_of)(params, *batch(0)))

            with pytest.raises(errors.BadRequest, match="inside a function that JAX compiles"):
                jax.jit(step)(params)

    @pytest.mark.parametrize("tree", [{"params": {}, "batch_stats": {}}, TrainState(params={}, opt_state={})])
    def test_a_tree_with_more_than_parameters(self, client: shoal.Client, tree: Any) -> None:
        with pytest.raises(errors.InvalidVariable, match=r"everything in a tree is trained; give .*params"):
            shoal.jax.DistributedOptimizer(tree, optim.SGD(0.1), job=name(), client=client)

    def test_an_optimizer_of_optax(self, client: shoal.Client) -> None:
        given: Any = optax.adam(1e-3)
        with pytest.raises(errors.InvalidOptimizer, match=r"optax.* give one of shoal\.optim"):
            shoal.jax.DistributedOptimizer(parameters(), given, job=name(), client=client)

    def test_an_address_beside_a_client(self, client: shoal.Client) -> None:
        with pytest.raises(errors.BadRequest, match="both given"):
            shoal.jax.DistributedOptimizer(parameters(), optim.SGD(0.1), job=name(), client=client, address="h:1")


def test_a_job_goes_on_from_moments_of_optax_and_optax_from_those_of_a_job(client: shoal.Client) -> None:
    plain, params = optax.adam(1e-2), parameters()
    state = plain.init(params)

    def alone(params: Any, state: Any, steps: range) -> tuple[Any, Any]:
        for step in steps:
            updates, state = plain.update(gradients_of(params, *batch(step)), state)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = alone(params, state, range(10))
    wanted, _ = alone(params, state, range(10, 30))
    moments = state[0]
    given = optim.OptimizerState({"exp_avg": moments.mu, "exp_avg_sq": moments.nu}, updates=int(moments.count))
    with shoal.jax.DistributedOptimizer(
        params, optim.Adam(1e-2), job=name(), client=client, optimizer_state=given
    ) as optimizer:
        for step in range(10, 20):
            params = optimizer.update(params, gradients_of(params, *batch(step)))
        found = optimizer.session.optimizer_state()
    slots = {slot: shoal.unflatten(it, like=params) for slot, it in found.slots.items()}
    mu, nu = (jax.tree.map(jnp.asarray, slots[it]) for it in ("exp_avg", "exp_avg_sq"))
    adam = state[0]._replace(mu=mu, nu=nu, count=jnp.asarray(found.updates, jnp.int32))
    later, _ = alone(params, (adam, *state[1:]), range(20, 30))
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(later), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)

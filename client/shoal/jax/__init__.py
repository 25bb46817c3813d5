"""JAX: the servers of a cluster train a tree of arrays, or a module of Flax, in the loop that you have.

    optimizer = shoal.jax.DistributedOptimizer(params, shoal.optim.AdamW(1e-3), job="m", workers=2)
    for epoch in range(epochs):
        for numbers in optimizer.batches(len(images)):
            loss, gradients = step(params, images[numbers], labels[numbers])  # jax.value_and_grad, in jax.jit
            params = optimizer.update(params, gradients)

Start this program on each worker. Pulls and pushes happen on the host, between the functions that JAX compiles: never
call `update` inside one. Needs the extra `jax`.
"""

from shoal._system import load

load("jax", "shoal.jax", extra="jax")

from shoal.jax._optimizer import DistributedOptimizer  # noqa: E402 - after the check, whose error says what to install

__all__ = ["DistributedOptimizer"]

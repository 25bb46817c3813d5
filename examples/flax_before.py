"""A loop in plain JAX and Flax: a classifier of handwritten digits. `flax_after.py` is the same loop on a cluster."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

EPOCHS = 10


def digits() -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).with_name("digits.npz")) as found:
        return found["pixels"] / np.float32(16), found["labels"].astype(np.int32)


def network() -> nnx.Module:
    draw = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(64, 64, rngs=draw), nnx.relu, nnx.Linear(64, 10, rngs=draw))


@nnx.jit
@nnx.value_and_grad
def step(model: nnx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def main() -> None:
    model, (images, labels) = network(), digits()
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    draw = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        for numbers in np.array_split(draw.permutation(len(images)), 56):
            loss, gradients = step(model, images[numbers], labels[numbers])
            optimizer.update(model, gradients)
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    right = jnp.argmax(model(images), axis=1) == labels
    print(f"accuracy {right.mean():.4f}", flush=True)


if __name__ == "__main__":
    main()

"""One script for each task of TF_CONFIG: trains least squares by a ParameterServerStrategy, and prints the weights."""

import json

import numpy as np

import shoal
from shoal import optim
from shoal_distribute import ParameterServerStrategy, Strategy

RNG = np.random.default_rng(0)
SAMPLES, STEPS = 60, 10
X, Y, START = RNG.normal(size=(SAMPLES, 4)), RNG.normal(size=SAMPLES), RNG.normal(size=4)


def train(strategy: Strategy, workers: int, number: int) -> np.ndarray:
    """Trains on one worker's share of the samples; returns the weights."""
    optimizer = optim.Momentum(0.05)
    with strategy.scope():
        weights = strategy.create_variable("w", START)
        strategy.adopt_optimizer(optimizer)
    x, y = (np.array_split(it, workers)[number] for it in (X, Y))

    def step() -> None:
        error = x @ weights.read() - y
        strategy.apply_gradients(optimizer, [(2 * x.T @ error / SAMPLES, weights)])

    for _ in range(STEPS):
        strategy.run(step)
    return weights.numpy()


if __name__ == "__main__":
    made = ParameterServerStrategy(consistency=shoal.Synchronous(), devices=["/cpu:0"], shards=2)
    print(json.dumps(train(made, made.num_replicas_in_sync, made.input_pipeline_id).tolist()), flush=True)

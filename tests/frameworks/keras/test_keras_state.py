"""State of Keras' optimizers: a job goes on from it as Keras would, and Keras from that of a job, by .keras files."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

PROGRAM = Path(__file__).with_name("keras_state.py")
CASES = [
    *(("torch", it) for it in ("sgd", "momentum", "nesterov", "adam", "adamw")),
    *(("jax", it) for it in ("momentum", "adam")),
    ("tensorflow", "adam"),
]
BOUNDS = {"sgd": 1e-12, "momentum": 1e-12, "nesterov": 1e-12, "adam": 1e-10, "adamw": 1e-10}
# Keras on TensorFlow rounds numbers such as 0.999 to float32, and then computes in float64.
TENSORFLOW_BOUND = 1e-5


def environ(backend: str) -> dict[str, str]:
    return {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "JAX_ENABLE_X64": "1"}


@pytest.mark.parametrize(("backend", "optimizer"), CASES)
def test_keras_a_job_and_keras_train_in_turn(
    client: shoal.Client, tmp_path: Path, backend: str, optimizer: str
) -> None:
    if not importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is not installed")
    arguments = [sys.executable, str(PROGRAM), optimizer, client.address, str(tmp_path)]
    farthest, after_job, at_end = subprocess.check_output(arguments, env=environ(backend), timeout=110).split()
    assert float(farthest) <= (TENSORFLOW_BOUND if backend == "tensorflow" else BOUNDS[optimizer])
    assert (int(after_job), int(at_end)) == (40, 60)


REFUSED = """
import keras, numpy as np, shoal.keras, shoal.errors
from shoal.optim import OptimizerState

def told(call):
    try: call()
    except shoal.errors.InvalidOptimizer as error: print(error)

def model(optimizer):
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(optimizer, loss="mse")
    made.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    return made

of_adam, of_momentum = model(keras.optimizers.Adam()), model(keras.optimizers.SGD(0.1, momentum=0.9))
state = shoal.keras.optimizer_state
told(lambda: state(model(keras.optimizers.Lion()).optimizer, of_adam))
told(lambda: state(of_adam.optimizer, of_momentum))
amsgrad = model(keras.optimizers.Adam(amsgrad=True))
told(lambda: state(amsgrad.optimizer, amsgrad))
of_momentum.optimizer.learning_rate = 0.0
told(lambda: state(of_momentum.optimizer, of_momentum))
told(lambda: shoal.keras.load_optimizer_state(state(of_adam.optimizer, of_adam), keras.optimizers.SGD(0.1), of_adam))
empty = OptimizerState({"exp_avg": {}, "exp_avg_sq": {}})
told(lambda: shoal.keras.load_optimizer_state(empty, keras.optimizers.Adam(), of_adam))
print(state(keras.optimizers.Adam(), of_adam))
"""


def test_what_is_refused() -> None:
    told = subprocess.check_output([sys.executable, "-c", REFUSED], env=environ("torch"), text=True, timeout=60)
    lion, other, amsgrad, rate, slots, missing, new = told.strip().splitlines()
    assert "the optimizer is Lion, whose state the servers do not have; give one of keras.optimizers: SGD, Adam" in lion
    assert "Adam has no variable sequential_1_dense_1_bias_momentum; give the model that it has trained" in other
    assert "Adam has the variable sequential_3_dense_3_bias_velocity_hat" in amsgrad
    assert "the learning rate of SGD is 0" in rate
    assert "differ in the slots exp_avg, exp_avg_sq; give the optimizer that computes what the job does" in slots
    assert "the state has no exp_avg of 'sequential/dense/bias'" in missing
    assert new == "OptimizerState(slots={}, updates=0)"

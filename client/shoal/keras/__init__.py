"""Keras 3: the servers of a cluster train a model in `model.fit`, on the backends JAX, PyTorch and TensorFlow.

    model.compile(shoal.keras.DistributedOptimizer(shoal.optim.AdamW(1e-3), job="m", workers=2), loss=loss)
    model.fit(x, y, batch_size=32, epochs=10)

Start this program on each worker. It needs Keras 3 and a backend. `shoal_distribute.keras` is another thing: models in
the form of Keras that need neither.
"""

from shoal._system import load

load("keras", "shoal.keras", extra="keras")

from shoal.keras._metrics import ReportMetrics  # noqa: E402 - after the check, whose error says what to install
from shoal.keras._optimizer import DistributedOptimizer  # noqa: E402
from shoal.keras._state import load_optimizer_state, optimizer_state  # noqa: E402

__all__ = ["DistributedOptimizer", "ReportMetrics", "load_optimizer_state", "optimizer_state"]

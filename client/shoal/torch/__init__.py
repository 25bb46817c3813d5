"""PyTorch: the servers of a cluster train the parameters of a module, in the loop that you have.

    optimizer = shoal.torch.DistributedOptimizer(model, shoal.optim.AdamW(1e-3), job="m", workers=2, batch_size=64)
    loader = shoal.torch.DataLoader(dataset, session=optimizer)

Start this program on each worker. `optimizer` is a `torch.optim.Optimizer`: `step` sends the gradients, and puts the
new values into the module. `session` is the plain form, without an optimizer of PyTorch. Needs the extra `torch`.
"""

from shoal._system import load

load("torch", "shoal.torch", extra="torch")

from shoal.torch._data import DataLoader  # noqa: E402 - after the check, whose error says what to install
from shoal.torch._optimizer import DistributedOptimizer  # noqa: E402
from shoal.torch._session import ModelSession, session  # noqa: E402
from shoal.torch._state import optimizer_state, state_dict_for  # noqa: E402

__all__ = ["DataLoader", "DistributedOptimizer", "ModelSession", "optimizer_state", "session", "state_dict_for"]

"""A step of ResNet-18 by `shoal.torch` and by a session, by turns: python benchmarks/adapters/torch_adapter.py.

One process trains two jobs on one server. In the first, the adapter's optimizer takes the place of PyTorch's. In the
second, the loop has a plain session: it copies the values into the module, and pushes arrays that share the memory of
the gradients, as the documentation shows. The script prints one JSON line.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and PyTorch are loaded: later it does less

import torch
from torch import nn
from torch_loops import RATE, Loop, backward_of, by_turns, compared, loop_of, made

import shoal.torch

_TURNS, _STEPS, _WARM_UP = 12, 1, 2


def session_loop(model: nn.Module, backward: Callable[[], torch.Tensor], session: shoal.Session) -> Loop:
    """Returns the loop with a plain session."""
    floats = {name: it for name, it in model.named_buffers() if it.is_floating_point()}

    def run(steps: int) -> None:
        for _ in range(steps):
            values = session.pull()
            with torch.no_grad():
                for name, it in [*model.named_parameters(), *floats.items()]:
                    it.copy_(torch.from_numpy(values[name]))
            del values
            model.zero_grad()
            backward()
            gradients = {name: it.grad.numpy() for name, it in model.named_parameters() if it.grad is not None}
            session.push(gradients, updates={name: it.numpy() for name, it in floats.items()})

    return run


def variables_of(model: nn.Module) -> dict[str, shoal.Variable]:
    found = {name: shoal.Variable.of(it.detach().numpy()) for name, it in model.named_parameters()}
    for name, it in model.named_buffers():
        if it.is_floating_point():
            found[name] = shoal.Variable.of(it.numpy(), trainable=False, aggregation="mean")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    short = parser.parse_args().short
    turns, steps, warm_up, name = (1, 1, 1, "cnn") if short else (_TURNS, _STEPS, _WARM_UP, "resnet18")
    torch.set_num_threads(1)
    one, other, given = made(name), made(name), shoal.optim.AdamW(RATE)
    with ExitStack() as stack:
        cluster = stack.enter_context(shoal.LocalCluster(servers=1, workers=0))
        client = stack.enter_context(cluster.client())
        optimizer = stack.enter_context(shoal.torch.DistributedOptimizer(one, given, job="adapter", client=client))
        session = stack.enter_context(client.session("session", variables=variables_of(other), optimizer=given))
        loops = {
            "adapter": loop_of(optimizer, backward_of(name, one)),
            "session": session_loop(other, backward_of(name, other), session),
        }
        by_turns(loops, 1, warm_up)
        taken = by_turns(loops, turns, steps)
    print(json.dumps(compared(taken, "adapter", "session")))


if __name__ == "__main__":
    main()

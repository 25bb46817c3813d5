"""The dense step through `shoal.torch`: python benchmarks/adapters/torch_dense.py [--short].

There is one server and one worker. Each parameter gets its gradient, 1e-6 w + 1e-3, without a backward pass, as in the
script of torch rpc. `step` pushes the gradients and pulls the values. The script prints one JSON line.
"""

import argparse
import json
import sys
from pathlib import Path

import shoal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    shoal.tune_allocator()  # before NumPy and PyTorch are loaded: later it does less

import torch
from peers import workload as wl
from torch import nn

import shoal.torch

_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    short = parser.parse_args().short
    torch.set_num_threads(1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in wl.shapes("dense")])
    with (
        shoal.LocalCluster(servers=1, workers=0) as cluster,
        shoal.torch.DistributedOptimizer(
            model,
            shoal.optim.SGD(_RATE),
            job="dense",
            consistency=shoal.Asynchronous(),
            client=cluster.client(),
        ) as optimizer,
    ):
        taken = 0

        def run_steps(count: int) -> None:
            nonlocal taken
            for _ in range(count):
                for parameter in model:
                    parameter.grad = parameter.detach() * 1e-6 + 1e-3
                optimizer.step()
            taken += count

        seconds = wl.measure(run_steps, 1, 0.05) if short else wl.measure(run_steps)
        check(model, taken)
    print(json.dumps({"ms_per_step": seconds * 1e3, "gb_per_s": 2 * wl.DENSE_BYTES / seconds / 1e9}))


def check(model: nn.ParameterList, steps: int) -> None:
    """Fails unless the values are those after so many steps from zeros."""
    wanted = 0.0
    for _ in range(steps):
        wanted -= _RATE * (wanted * 1e-6 + 1e-3)
    for number, parameter in enumerate(model):
        if not torch.allclose(parameter, torch.tensor(wanted), rtol=0.01):
            sys.exit(f"parameter {number} is {parameter.mean():g} after {steps} steps; it should be {wanted:g}")


if __name__ == "__main__":
    main()

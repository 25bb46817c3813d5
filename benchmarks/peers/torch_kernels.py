"""torch's fused optimizers on one thread, one update at a time: python torch_kernels.py ELEMENTS LEARNING_RATE.

The script first prints the name of this peer, with torch's version. Each line of standard input is "go NAME". For each
one, the script makes one update by torch.optim.NAME and prints the seconds that it took. Only the arrays of one
optimizer are in memory at a time.
"""

import sys
import time

import torch


def made(name: str, elements: int, learning_rate: float) -> torch.optim.Optimizer:
    """Returns the optimizer of one flat float32 parameter that has a gradient."""
    parameter = torch.nn.Parameter(torch.randn(elements))
    parameter.grad = torch.randn(elements)
    return getattr(torch.optim, name)([parameter], lr=learning_rate, fused=True)


def main() -> None:
    elements, learning_rate = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    print(f"torch {torch.__version__.partition('+')[0]} fused, one thread", flush=True)
    current, optimizer = "", None
    for line in sys.stdin:
        _, name = line.split()
        if name != current:
            optimizer = None  # frees its arrays
            current, optimizer = name, made(name, elements, learning_rate)
        start = time.perf_counter()
        optimizer.step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()

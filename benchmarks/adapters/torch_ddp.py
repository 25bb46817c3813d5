"""A step of two workers by `shoal.torch` and by DistributedDataParallel: python torch_ddp.py cnn|resnet18.

Two processes, with one thread each, train the same model by turns: some steps synchronously with one server of Shoal,
then as many with DistributedDataParallel on gloo. Both clip the norm of the mean gradient, and have AdamW with a cosine
schedule. The script prints one JSON line, with the times of the first process. With --short it only sees that it runs.
"""

import argparse
import json
import os
import subprocess
import sys

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and PyTorch are loaded: later it does less

import torch
import torch.distributed as dist
from torch import nn
from torch_loops import CLIP_NORM, RATE, Loop, backward_of, by_turns, compared, loop_of, made

import shoal.torch

_WARM_UP = 2
_TURNS = {"cnn": (12, 30), "resnet18": (10, 1)}  # turns, and steps of a turn
_SCHEDULED = 10_000  # steps of the schedule
_TIMEOUT_S = 150


def ddp_loop(name: str) -> Loop:
    """Returns the loop with DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(made(name))
    optimizer, backward = torch.optim.AdamW(model.parameters(), RATE), backward_of(name, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _SCHEDULED)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()

    return run


def work(name: str, rank: int, address: str, *, short: bool) -> None:
    """Trains as one of the workers; that with rank 0 prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    given = shoal.optim.AdamW(shoal.optim.CosineLR(RATE, _SCHEDULED), clip_norm=CLIP_NORM)
    model = made(name)
    with shoal.torch.DistributedOptimizer(model, given, job="ddp", workers=2, address=address) as optimizer:
        loops = {"shoal": loop_of(optimizer, backward_of(name, model)), "ddp": ddp_loop(name)}
        by_turns(loops, 1, _WARM_UP)
        taken = by_turns(loops, *((1, 1) if short else _TURNS[name]))
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(compared(taken, "shoal", "ddp")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model", choices=_TURNS)
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    parser.add_argument("--rank", type=int, help="of this worker; without it, the script starts all processes")
    options = parser.parse_args()
    if options.rank is not None:
        work(options.model, options.rank, os.environ["SHOAL_COORDINATOR"], short=options.short)
        return
    with shoal.LocalCluster(servers=1, workers=0) as cluster:
        listening = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.port), "OMP_NUM_THREADS": "1"}
        places |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 uses the store of this process
        environ = {**os.environ, **places, "SHOAL_COORDINATOR": cluster.address}
        command = [sys.executable, __file__, options.model, *(["--short"] if options.short else [])]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environ) for rank in range(2)]
        codes = [rank.wait(_TIMEOUT_S) for rank in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()

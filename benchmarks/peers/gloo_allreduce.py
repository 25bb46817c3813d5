"""Gloo's all-reduce of the dense workload's bytes: python gloo_allreduce.py RANKS (pip install torch).

A step replaces the arrays of all ranks by their mean.
"""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import workload as wl


def main(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x = torch.ones(wl.DENSE_BYTES // 4)

    def run_steps(n: int) -> None:
        for _ in range(n):
            dist.all_reduce(x)
            x.mul_(1 / world)
        dist.barrier()

    seconds = wl.measure(run_steps)
    if rank == 0:
        print(
            json.dumps(
                {
                    "peer": f"gloo all-reduce, {world} ranks",
                    "workload": "all_reduce",
                    "ms_per_step": seconds * 1e3,
                    "algorithm_gb_per_s": wl.DENSE_BYTES / seconds / 1e9,
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = int(sys.argv[1])
    mp.spawn(main, args=(world, port), nprocs=world)

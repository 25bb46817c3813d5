"""A parameter server on torch.distributed.rpc: python torch_rpc_ps.py dense|small|sparse [tcp] (pip install torch).

The project received this script together with the measurements on which the project's targets are based. Its code has
not been changed. The pattern is that of PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC
Framework".
"""

import os
import socket
import sys

import torch
import torch.multiprocessing as mp
import workload as wl
from torch.distributed import rpc

WEIGHTS = TABLE = ACCUMULATOR = None


def pull():
    return WEIGHTS


def push(grads):
    for w, g in zip(WEIGHTS, grads, strict=True):
        w.sub_(g, alpha=1e-3)


def pull_rows(ids):
    return TABLE[ids]


def push_rows(ids, grad):
    ACCUMULATOR.index_add_(0, ids, grad * grad)
    TABLE.index_add_(0, ids, -0.01 * grad / (ACCUMULATOR[ids].sqrt() + 1e-10))


def main(rank, port, kind, tcp):
    global WEIGHTS, TABLE, ACCUMULATOR  # noqa: PLW0603 - what the calls find
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if rank == 0 and kind != "sparse":
        WEIGHTS = [torch.zeros(s) for s in wl.shapes(kind)]
    elif rank == 0:
        TABLE, ACCUMULATOR = torch.zeros(wl.ROWS, wl.DIM), torch.full((wl.ROWS, wl.DIM), 0.1)
    extra = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, **extra)
    rpc.init_rpc(f"n{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        batches = [torch.from_numpy(b) for b in wl.id_batches()] if kind == "sparse" else []

        def dense(n):
            for _ in range(n):
                weights = rpc.rpc_sync("n0", pull)
                rpc.rpc_sync("n0", push, ([w * 1e-6 + 1e-3 for w in weights],))

        def sparse(n):
            for i in range(n):
                unique, index = torch.unique(batches[i % len(batches)], return_inverse=True)
                rows = rpc.rpc_sync("n0", pull_rows, (unique,))
                grad = torch.zeros_like(rows).index_add_(0, index, rows[index] * 1e-3 + 1e-3)
                rpc.rpc_sync("n0", push_rows, (unique, grad))

        seconds = wl.measure(dense if kind != "sparse" else sparse)
        wl.report("torch rpc " + ("tcp" if tcp else "shared memory"), kind, seconds)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(main, args=(port, sys.argv[1], "tcp" in sys.argv), nprocs=2)

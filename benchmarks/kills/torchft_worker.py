"""A replica group of torchft with one worker: TORCHFT_LIGHTHOUSE=... python torchft_worker.py NAME FOLDER.

The pattern is that of torchft's documentation: a `Manager` over gloo forms a quorum for each step. A worker that starts
again takes the weights of another one. If a worker is lost during a step, the others discard that step. As in torchft's
example `train_ddp.py`, each worker also saves checkpoints with its manager's state, for the loss of all workers.

The gradients are reduced by `Manager.allreduce`. With torchft 0.2.0 and torch 2.13, `torchft.DistributedDataParallel`
ends each surviving worker with an AssertionError when a worker is lost during its reduction.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import update_log
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo

# Seconds and attempts that let a worker outlive a restart of the lighthouse.
QUORUM_S, QUORUM_RETRIES = 30, 20


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    log = update_log.UpdateLog(folder / f"{name}.updates")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in update_log.SHAPES)
    optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)

    def state():
        return {"weights": weights.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state):
        weights.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=QUORUM_S),
        quorum_retries=QUORUM_RETRIES,
        hostname="127.0.0.1",
    )
    checkpoint = folder / f"{name}.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        load(saved["state"])
        manager.load_state_dict(saved["manager"])
    saved_at = time.monotonic()
    while True:
        manager.start_quorum()
        time.sleep(update_log.COMPUTE_S)  # as if it computed; the quorum is formed meanwhile
        gradient = torch.cat([torch.full_like(weight, -1.0).flatten() for weight in weights])
        manager.allreduce(gradient).wait()
        if not manager.should_commit():
            continue
        for weight, part in zip(weights, gradient.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight)
        optimizer.step()
        log.append(manager.batches_committed())
        if time.monotonic() - saved_at >= update_log.CHECKPOINT_S:
            written = checkpoint.with_suffix(".new")
            torch.save({"state": state(), "manager": manager.state_dict()}, written)
            os.replace(written, checkpoint)
            saved_at = time.monotonic()


if __name__ == "__main__":
    main()

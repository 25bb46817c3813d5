"""Trains models on meshes of stages, replicas and parts, one after the other, in forks of this process.

The argument is a list of `Mesh`es in JSON. Each rank writes what it has at the end into the folder of its mesh:
"rank-0.npz" and so on with variables, slots, a loss and outputs, or "rank-0.txt" with its error.
"""

import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors
from shoal._transport import TokenSecurity
from shoal_distribute import Checkpoint, MultiWorkerPipelineStrategy, keras
from shoal_distribute.collectives import Group
from support.split_models import CUT, MICRO_BATCHES, made, split_net, trained


@dataclass(frozen=True)
class Mesh:
    """What the ranks of a mesh do.

    Attributes:
        folder: where they write.
        sizes: number of stages, of replicas, and of the ranks that split each stage.
        steps: number of steps.
        restore: the checkpoint that they begin with; "" for none.
        lost: the rank that kills itself after the first step; -1 for none.
    """

    folder: str
    sizes: tuple[int, int, int]
    steps: int = 30
    restore: str = ""
    lost: int = -1


def take_part(mesh: Mesh, rank: int, addresses: list[str], listening: socket.socket) -> None:
    """Does the work of a rank."""
    keras.config.set_floatx("float64")
    stages, replicas, split = mesh.sizes
    joined = Group.open(rank, addresses, security=TokenSecurity(b"of this test"), listening=listening)
    options: dict[str, Any] = {"device": "/cpu:0", "cut": [CUT][: stages - 1], "group": joined}
    options["micro_batches"] = MICRO_BATCHES // replicas
    with MultiWorkerPipelineStrategy(stages, replicas, split=split, **options) as strategy:
        model = made(strategy, lambda: split_net(strategy.mesh))
        checkpoint = Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(mesh.restore or None)
        own = Path(mesh.folder, f"rank-{rank}")
        try:
            if mesh.lost >= 0:
                trained(model, 1)
            if mesh.lost == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            found = trained(model, mesh.steps)
            checkpoint.save(Path(mesh.folder, "saved"))
            np.savez(own.with_suffix(".npz"), *found)
        except errors.RankLost as error:
            own.with_suffix(".txt").write_text(error.message)


def run(mesh: Mesh) -> None:
    """Runs the ranks of a mesh, and waits for them."""
    ranks = int(np.prod(mesh.sizes))
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    addresses = [f"127.0.0.1:{it.getsockname()[1]}" for it in listening]
    children = []
    for rank, own in enumerate(listening):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            for other in listening:
                if other is not own:
                    other.close()
            take_part(mesh, rank, addresses, own)
            status = 0
        finally:
            os._exit(status)
    for own in listening:
        own.close()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(it, 0)[1]) for it in children]
    assert statuses == [-signal.SIGKILL if rank == mesh.lost else 0 for rank in range(ranks)], statuses


if __name__ == "__main__":
    for given in json.loads(sys.argv[1]):
        run(Mesh(**given))

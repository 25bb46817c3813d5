"""Trains pipelines one after the other in forks of this process, one for each rank.

The argument is a list of `Plan`s in JSON. The program prints a list for each: what the ranks have to say, which is
their variables or an error, or nothing if they have been killed.
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
from shoal_distribute import MultiWorkerPipelineStrategy, keras
from shoal_distribute.collectives import Group, group, mesh, shared_blocks
from shoal_distribute.pipeline import model_stages, stage
from shoal_distribute.pipeline.processes import links, runner
from support.faults.doom import Doom

STAGES, REPLICAS = 2, 2
RANKS = STAGES * REPLICAS
_CODE = {str(module.__file__) for module in (group, mesh, shared_blocks, model_stages, stage, links, runner)}
_RNG = np.random.default_rng(0)
_X, _Y = _RNG.normal(size=(32, 6)), _RNG.normal(size=(32, 3))


@dataclass(frozen=True)
class Plan:
    """What the ranks do.

    Attributes:
        folder: where they write.
        epochs: number of epochs of two steps each, with a checkpoint after each.
        lost: the rank that kills itself; -1 for none.
        line: the line of its code at which it does so, after the first step.
    """

    folder: str
    epochs: int
    lost: int = -1
    line: int = 0


class Begin(keras.callbacks.Callback):
    """Begins to count lines for the doom after the first step.

    Args:
        doom: the doom.
    """

    def __init__(self, doom: Doom) -> None:
        self._doom = doom

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._doom.begin()


def trained(plan: Plan, strategy: MultiWorkerPipelineStrategy, callbacks: list[Any]) -> list[str]:
    """Returns the bytes of the variables after all epochs."""
    keras.config.set_floatx("float64")
    with strategy.scope():
        inputs = keras.Input((6,))
        x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(8, "tanh", name="first")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3, name="last")(x), name="net")
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
    for number, variable in enumerate(model.trainable_variables):  # the same in each run
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    backup = keras.callbacks.BackupAndRestore(Path(plan.folder, "checkpoints"))
    model.fit(_X, _Y, batch_size=16, epochs=plan.epochs, verbose=0, callbacks=[backup, *callbacks])
    return [it.tobytes().hex() for it in model.get_weights()]


def take_part(plan: Plan, rank: int, addresses: list[str], listening: socket.socket) -> dict[str, Any]:
    """Returns what a rank has to say."""
    callbacks = [Begin(Doom(plan.line, _CODE))] if rank == plan.lost else []
    joined = Group.open(rank, addresses, security=TokenSecurity(b"of this test"), listening=listening)
    options: dict[str, Any] = {"device": "/cpu:0", "micro_batches": 2, "cut": ["norm"]}
    with MultiWorkerPipelineStrategy(STAGES, REPLICAS, group=joined, **options) as strategy:
        try:
            return {"variables": trained(plan, strategy, callbacks)}
        except errors.RankLost as error:
            return {"error": error.message}


def run(plan: Plan) -> list[dict[str, Any]]:
    """Returns what the ranks have to say."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]
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
            _said(plan, rank).write_text(json.dumps(take_part(plan, rank, addresses, own)))
            status = 0
        finally:
            os._exit(status)
    for own in listening:
        own.close()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(it, 0)[1]) for it in children]
    assert statuses == [-signal.SIGKILL if rank == plan.lost else 0 for rank in range(RANKS)], statuses
    return [{} if rank == plan.lost else json.loads(_said(plan, rank).read_text()) for rank in range(RANKS)]


def _said(plan: Plan, rank: int) -> Path:
    return Path(plan.folder, f"rank-{rank}.json")


if __name__ == "__main__":
    print(json.dumps([run(Plan(**it)) for it in json.loads(sys.argv[1])]))

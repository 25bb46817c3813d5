"""Shared state: all ranks of a group take the variables, the optimizers' state and the progress of one of them.

Ranks that do not take it compare digests of their variables instead.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from shoal import errors, optim
from shoal.program import Array
from shoal.v1 import job_pb2
from shoal_distribute.collectives import Group
from shoal_distribute.group_arrays import bytes_from
from shoal_distribute.strategies.local_state import OptimizerStates
from shoal_distribute.values import DistributedVariable


class SharedState:
    """What the processes of an elastic group share.

    Args:
        variables: returns all variables, in the order in which they were made, which is the same in all processes.
        states: the state of the optimizers.
        put: returns an array on the device of a copy of the variables.
    """

    def __init__(
        self,
        variables: Callable[[], Iterable[DistributedVariable]],
        states: OptimizerStates,
        put: Callable[[int, np.ndarray], Array],
    ) -> None:
        self._variables, self._states, self._put = variables, states, put

    def take(self, group: Group, root: int, progress: int) -> int:
        """Replaces the state of all ranks by that of one. All ranks call it.

        Args:
            group: the ranks.
            root: the rank whose state all get.
            progress: this rank's progress.

        Returns:
            The progress of that rank.

        Raises:
            RankLost: a rank has failed. The state of this rank is as before.
            RanksDisagree: this rank has other variables or optimizers.
        """
        variables, optimizers = list(self._variables()), self._states.optimizers
        slots = [self._states.arrays(it) for it in optimizers] if group.rank == root else []
        own = json.dumps(self._description(variables, optimizers, slots, progress))
        said = json.loads(bytes_from(group, root, own.encode()))
        mine = [_described(it.name, it.shape, it.dtype) for it in variables]
        if said["variables"] != mine or len(said["optimizers"]) != len(optimizers):
            raise errors.RanksDisagree(
                f"this process has other variables or optimizers than rank {root}, whose state it is to take; make all "
                "of them, in the same order, before training begins",
                rank=root,
            )
        # First all arrays, then the change: a failure must leave a state that a step has made.
        values = [group.broadcast(np.asarray(it.numpy(), order="C"), root) for it in variables]
        taken = [
            {path: group.broadcast(_of(own, path, shape, dtype), root) for path, shape, dtype in theirs["slots"]}
            for theirs, own in zip_longest(said["optimizers"], slots)
        ]
        if group.rank != root:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            for optimizer, theirs, arrays in zip(optimizers, said["optimizers"], taken, strict=True):
                self._states.restore(optimizer, theirs["version"], arrays, self._put)
                if theirs["rate"]:
                    rate = job_pb2.Schedule.FromString(bytes.fromhex(theirs["rate"]))
                    self._states.set_learning_rate(optimizer, optim.Schedule.from_proto(rate))
        return int(said["progress"])

    def _description(
        self,
        variables: Sequence[DistributedVariable],
        optimizers: Sequence[optim.Optimizer],
        slots: Sequence[dict[str, np.ndarray]],
        progress: int,
    ) -> dict[str, Any]:
        return {
            "progress": progress,
            "variables": [_described(it.name, it.shape, it.dtype) for it in variables],
            "optimizers": [
                {
                    "version": self._states.of(optimizer).version,
                    "rate": _encoded(self._states.of(optimizer).learning_rate),
                    "slots": [_described(path, array.shape, array.dtype) for path, array in own.items()],
                }
                for optimizer, own in zip(optimizers, slots, strict=False)
            ],
        }


def digest(variables: Iterable[DistributedVariable]) -> int:
    """Returns a number of 63 bits that differs if the values of trainable variables do."""
    found = hashlib.blake2b(digest_size=8)
    for variable in variables:
        if variable.trainable:
            found.update(np.asarray(variable.numpy(), order="C").tobytes())
    return int.from_bytes(found.digest()) >> 1


def check_digests(digests: Sequence[int]) -> None:
    """Checks that all ranks have the same values of the variables.

    Args:
        digests: the digest of each rank.

    Raises:
        RanksDisagree: a rank has other values than rank 0.
    """
    if others := [rank for rank, it in enumerate(digests) if it != digests[0]]:
        named = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        raise errors.RanksDisagree(
            f"{named} other values of the variables than rank 0; call set_weights, load_weights or assign with the "
            "same values in all processes, or in none",
            rank=others[0],
        )


def _of(own: dict[str, np.ndarray] | None, path: str, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Returns the root's array, or memory for it."""
    return np.empty(shape, np.dtype(dtype)) if own is None else np.asarray(own[path], order="C")


def _described(name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> list[Any]:
    return [name, list(shape), dtype.name]


def _encoded(rate: optim.Schedule | None) -> str:
    return "" if rate is None else rate.to_proto().SerializeToString().hex()


__all__ = ["SharedState", "check_digests", "digest"]

"""Gradient buffers: arrays for a program's gradients, which a push sends without a copy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_

import numpy as np

from shoal._numerics import Aggregation
from shoal._transport import ServerConnection
from shoal._wire import Packer, PushPayload


class GradientBuffers(dict[str, np.ndarray]):
    """Arrays for the gradients of one step and one push. Most of them lie in the memory that the push is sent from.

    Args:
        packer: packer of the placement.
        payloads: payloads by connection, with memory for every trainable variable.
    """

    def __init__(self, packer: Packer, payloads: Mapping[ServerConnection, PushPayload]) -> None:
        super().__init__()
        self._payloads = payloads
        for payload in payloads.values():
            for views in packer.lend(payload.layout, _memory(payload)):
                self.update(views)
        self._lent = dict(self)  # arrays in the payloads' memory: the first ones, in the same order
        for name in packer.unlendable:
            variable = packer.variables[name]
            self[name] = np.empty(variable.shape, variable.dtype)

    @property
    def pushed(self) -> bool:
        """Whether the arrays have been pushed, so that their memory is in use."""
        return not self._payloads

    @property
    def unchanged(self) -> bool:
        """Whether all arrays are still the lent ones, so that none needs a check of its own."""
        return len(self) == len(self._lent) and all(map(is_, self.values(), self._lent.values()))

    def convert(self) -> None:
        """Makes NumPy arrays of the values by which the program has replaced arrays."""
        others = {name: np.asarray(array) for name, array in self.items() if type(array) is not np.ndarray}
        self.update(others)

    def take(
        self,
        connections: Sequence[ServerConnection],
        updates: Mapping[str, np.ndarray],
        aggregations: Sequence[Aggregation],
        *,
        unchanged: bool,
    ) -> Mapping[ServerConnection, PushPayload] | None:
        """Takes the memory, with all arrays in it, for a push over these connections.

        Args:
            connections: connections of the push.
            updates: arrays of non-trainable variables that the push also carries.
            aggregations: aggregations of the arenas that the push carries.
            unchanged: value of the property `unchanged`, which is slow to compute for many arrays.

        Returns:
            Payloads by connection. None if the memory belongs to other connections, or was pushed before.
        """
        payloads, self._payloads = self._payloads, {}
        if [*payloads] != [*connections]:
            return None
        copied = dict(updates)
        if not unchanged:
            copied |= {name: array for name, array in self.items() if self._lent.get(name) is not array}
        # A replacement may share memory with a target of the writes below.
        copied = {name: self._apart(array, payloads) for name, array in copied.items()}
        for payload in payloads.values() if copied else ():
            payload.packer.write_some(payload.layout, copied, _memory(payload))
        return {connection: replace(payload, aggregations=aggregations) for connection, payload in payloads.items()}

    @staticmethod
    def _apart(array: np.ndarray, payloads: Mapping[ServerConnection, PushPayload]) -> np.ndarray:
        shared = any(np.may_share_memory(array, _memory(payload)) for payload in payloads.values())
        return array.copy() if shared else array


def _memory(payload: PushPayload) -> np.ndarray:
    assert payload.copy is not None
    return payload.copy


__all__ = ["GradientBuffers"]

"""Arrays that a program computes its gradients into, so that a push has nothing to copy."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_

import numpy as np

from shoal._numerics import Aggregation
from shoal._transport import ServerConnection
from shoal._wire import Packer, PushPayload


class GradientBuffers(dict[str, np.ndarray]):
    """Arrays to compute a step's gradients into, for one push: most lie where the push is sent from.

    Args:
        packer: of the placement.
        payloads: by connection, with memory for every trainable variable.
    """

    def __init__(self, packer: Packer, payloads: Mapping[ServerConnection, PushPayload]) -> None:
        super().__init__()
        self._payloads = payloads
        for payload in payloads.values():
            for views in packer.lend(payload.layouts, _memory(payload)):
                self.update(views)
        self._lent = dict(self)  # those that lie there: the first, in the same order
        for name in packer.unlendable:
            variable = packer.variables[name]
            self[name] = np.empty(variable.shape, variable.dtype)

    @property
    def pushed(self) -> bool:
        """Whether they have been pushed, so that their memory is in use."""
        return not self._payloads

    @property
    def unchanged(self) -> bool:
        """Whether there are just those that lie there: then nothing needs to be looked at one by one."""
        return len(self) == len(self._lent) and all(map(is_, self.values(), self._lent.values()))

    def convert(self) -> None:
        """Makes NumPy arrays of what the program has put in the place of some."""
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
        """Takes the memory, with everything in it, for a push by these connections.

        Args:
            connections: of the push.
            updates: go with the gradients.
            aggregations: of the arenas that are brought.
            unchanged: as above: with many arrays it takes a while to say.

        Returns:
            Loads by connection; None: the memory is not theirs, or was pushed before.
        """
        payloads, self._payloads = self._payloads, {}
        if [*payloads] != [*connections]:
            return None
        copied = dict(updates)
        if not unchanged:
            copied |= {name: array for name, array in self.items() if self._lent.get(name) is not array}
        # An array in the place of another may itself lie where something is about to be written.
        copied = {name: self._apart(array, payloads) for name, array in copied.items()}
        for payload in payloads.values() if copied else ():
            payload.packer.write_some(payload.layouts, copied, _memory(payload))
        return {connection: replace(payload, aggregations=aggregations) for connection, payload in payloads.items()}

    @staticmethod
    def _apart(array: np.ndarray, payloads: Mapping[ServerConnection, PushPayload]) -> np.ndarray:
        shared = any(np.may_share_memory(array, _memory(payload)) for payload in payloads.values())
        return array.copy() if shared else array


def _memory(payload: PushPayload) -> np.ndarray:
    assert payload.copy is not None
    return payload.copy


__all__ = ["GradientBuffers"]

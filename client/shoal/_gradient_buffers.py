"""Arrays that a program computes its gradients into, so that a push has nothing to copy."""

from collections.abc import Mapping, Sequence
from operator import is_

import numpy as np

from shoal._layout import Aggregation
from shoal._links import Link
from shoal._packing import Packer
from shoal._transfer import Load


class GradientBuffers(dict[str, np.ndarray]):
    """Arrays to compute a step's gradients into, for one push: most lie where the push is sent from.

    Args:
        arrays: by variable.
        lent: those of them that lie there: the first of `arrays`, in the same order.
        loads: by link, of that memory.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], lent: Mapping[str, np.ndarray], loads: Mapping[Link, Load]
    ) -> None:
        super().__init__(arrays)
        self._lent, self._loads = lent, loads

    @classmethod
    def lend(cls, packer: Packer, loads: Mapping[Link, Load]) -> "GradientBuffers":
        """Of every trainable variable; those that cannot lie in the loads' memory are arrays of their own."""
        views: dict[str, np.ndarray] = {}
        for load in loads.values():
            assert load.copy is not None
            views |= packer.lend(load.layouts, load.copy)
        own = {
            name: np.empty(variable.shape, variable.dtype)
            for name, variable in packer.variables.items()
            if name not in views and variable.aggregation is Aggregation.TRAINABLE
        }
        return cls(views | own, views, loads)

    def changed(self) -> dict[str, np.ndarray] | None:
        """The arrays that do not lie there: those that never did, and those that the program has put in their place.

        None: all that there were do, and they are all still there, so nothing needs to be looked at one by one.
        """
        lent = self._lent
        if len(self) == len(lent) and all(map(is_, self.values(), lent.values())):
            return None
        return {name: array for name, array in self.items() if lent.get(name) is not array}

    def take(self, links: Sequence[Link], changed: Mapping[str, np.ndarray]) -> Mapping[Link, Load] | None:
        """The memory, for a push by these links, with everything in it; None: it is not theirs, or was pushed before.

        Args:
            links: of the push.
            changed: are copied there.
        """
        loads, self._loads = self._loads, {}
        if [*loads] != [*links]:
            return None
        for load in loads.values() if changed else ():
            assert load.copy is not None
            load.packer.write_some(load.layouts, changed, load.copy)
        return loads


__all__ = ["GradientBuffers"]

"""The cores of the CPU, divided among devices of a process that compute at the same time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController


class CoreShares:
    """Limits the threads of linear algebra to the share of one device, while several devices compute.

    Each device of a CPU has a thread that calls libraries such as OpenBLAS, which start a thread for each core. Without
    a limit, the threads of all devices take the cores from each other. The limit holds for the whole process.

    Args:
        devices: number of devices that compute on the CPU at the same time, 1 or more.
        cores: number of usable cores; None means those that this process may use.
    """

    def __init__(self, devices: int, cores: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        share = max(1, cores // devices)
        libraries = ThreadpoolController().lib_controllers if devices > 1 else []
        # A smaller number that the user has set, such as by OPENBLAS_NUM_THREADS, stays.
        self._before = [(it, it.num_threads) for it in libraries if it.num_threads and it.num_threads > share]
        self._share = share

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limits the threads during the block."""
        try:
            for library, _ in self._before:
                library.set_num_threads(self._share)
            yield
        finally:
            for library, before in self._before:
                library.set_num_threads(before)


__all__ = ["CoreShares"]

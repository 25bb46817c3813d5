"""The health service of a role."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from grpc_health.v1 import health


class Health:
    """gRPC's own health service, with a separate one for watchers, since it sends to them under its lock."""

    def __init__(self, watching: ThreadPoolExecutor) -> None:
        self._checked = health.HealthServicer()
        self._watched = health.HealthServicer(experimental_non_blocking=True)
        self._watching = watching
        self.Check, self.List, self.Watch = self._checked.Check, self._checked.List, self._watched.Watch

    def set(self, services: Sequence[str], status: Any) -> None:
        """Sets the status of services, at once for probes and soon for watchers."""
        for service in services:
            self._checked.set(service, status)
            with suppress(RuntimeError):  # the pool is shut down, so there are no watchers
                self._watching.submit(self._watched.set, service, status)


__all__ = ["Health"]

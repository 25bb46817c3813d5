"""Load of each server during a run: the bytes that it moved, and the processor time that it used."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.request import Request, urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal._security import AccessRole, Credentials

_BYTES = ("shoal_server_sent_bytes_total", "shoal_server_received_bytes_total")
_PUSHES = "shoal_server_pushes_total"


class ServerLoad:
    """Load of the servers of a cluster.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: shoal.LocalCluster) -> None:
        credentials = Credentials.find().for_coordinator(cluster.address, AccessRole.ADMIN)
        self._authorization = dict(credentials.metadata())
        self._servers = {it.name: (it.metrics, it.pid) for it in cluster.processes if it.name.startswith("server")}

    @contextmanager
    def measured(self) -> Iterator[dict[str, dict[str, float]]]:
        """Yields a dict that has the load of each server during the block, by name, after the block."""
        before = self._read()
        load: dict[str, dict[str, float]] = {}
        yield load
        for name, after in self._read().items():
            load[name] = {key: round(value - before[name][key], 3) for key, value in after.items()}

    def _read(self) -> dict[str, dict[str, float]]:
        return {name: self._of(metrics, pid) for name, (metrics, pid) in self._servers.items()}

    def _of(self, metrics: str, pid: int) -> dict[str, float]:
        request = Request(f"http://{metrics}/metrics", headers=self._authorization)
        with urlopen(request, timeout=10) as reply:
            values = _sums(reply.read().decode())
        times = psutil.Process(pid).cpu_times()
        moved = sum(values.get(name, 0) for name in _BYTES)
        return {"bytes": moved, "pushes": values.get(_PUSHES, 0), "cpu_s": times.user + times.system}


def _sums(text: str) -> Mapping[str, float]:
    """Returns the sum of each metric over its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("outcome") != "staged":  # a staged push is answered again when it is committed
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums

"""Benchmark of a server's memory in a synchronous step: python benchmarks/cluster/step_memory.py [--short].

64 sessions push one shard of 64 MB to one server on loopback. The script measures three steps: the sessions push in
order of rank; rank 0 pushes last; and there are backup workers, whose gradients arrive after the step has closed.

The script prints one JSON line. It states for each step how many gradients the server held: the difference between the
peak resident memory and the resident memory before the step, divided by the bytes of a gradient. Digests of the values
show whether the first two steps computed the same bits.
"""

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np

SESSIONS, BACKUPS, ELEMENTS = 64, 4, 16_000_000
# Seconds until the server has given back the memory of the step before.
_REST_S = 8.0
# Many threads of one process send at once, so that a heartbeat may be late. This benchmark measures memory.
_PATIENT = {"coordinator": ["--heartbeat-timeout", "30"]}
# Ranks begin one after the other, this many seconds apart.
_APART_S = 0.002


def status_bytes(pid: int, field: str) -> int:
    """A figure of /proc/PID/status: VmRSS, or VmHWM for the most since it was reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


class Step:
    """The sessions of one job, and their gradients, which are parts of one array."""

    def __init__(self, sessions: Sequence[shoal.Session], values: np.ndarray, elements: int) -> None:
        self.sessions = {session.rank: session for session in sessions}
        self._values, self._elements = values, elements
        self.outcomes: dict[int, str] = {}

    def push(self, ranks: Iterable[int]) -> list[threading.Thread]:
        """Begins the pushes of these ranks, in this order."""
        threads = []
        for rank in ranks:
            threads.append(threading.Thread(target=self._push, args=(rank,)))
            threads[-1].start()
            time.sleep(_APART_S)
        return threads

    def _push(self, rank: int) -> None:
        gradient = self._values[97 * rank : 97 * rank + self._elements]
        self.outcomes[rank] = self.sessions[rank].push({"w": gradient}).outcome

    def run(self, first: Sequence[int], last: Sequence[int], pause_s: float) -> None:
        """Lets some ranks push, and the others after a pause."""
        threads = self.push(first)
        time.sleep(pause_s)
        for thread in threads + self.push(last):
            thread.join()


def measured(cluster: shoal.LocalCluster, order: str, elements: int, count: int) -> dict[str, Any]:
    """Takes a step in order of rank, and then one in the given order, which counts."""
    pid = cluster.process("server").pid
    values = np.random.default_rng(0).standard_normal(elements + 97 * count, np.float32)
    backups = BACKUPS if order == "backup_workers" else 0
    ranks, pause_s = [*range(count)], 3.0
    first, last = (ranks, []) if order == "in_order" else (ranks[::-1][:-1], [0])
    if backups:  # these come when the step has closed
        first, last = ranks[: backups - 1 : -1], ranks[:backups]
    with cluster.client() as client, ExitStack() as stack:
        sessions: list[shoal.Session] = []
        options = {
            "workers": count,
            "variables": {"w": shoal.Variable((elements,), initializer=shoal.initializers.Constant(0.5))},
            "optimizer": shoal.optim.SGD(1.0),
            "consistency": shoal.Synchronous(backup_workers=backups),
            "shards": 1,
        }
        opening = [
            threading.Thread(
                target=lambda: sessions.append(stack.enter_context(client.session(order.replace("_", "-"), **options)))
            )
            for _ in range(count)
        ]
        for thread in opening:
            thread.start()
        for thread in opening:
            thread.join()
        step = Step(sessions, values, elements)
        step.run(ranks, [], 0.0)  # so that connections are open
        time.sleep(_REST_S)
        before = status_bytes(pid, "VmRSS")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM
        begin = time.perf_counter()
        step.run(first, last, pause_s)
        seconds = time.perf_counter() - begin - pause_s
        peak = status_bytes(pid, "VmHWM")
        digest = hashlib.sha256(step.sessions[1].pull()["w"].tobytes()).hexdigest()[:16]
    accepted = sum(outcome == "accepted" for outcome in step.outcomes.values())
    return {
        f"{order}_gradients": (peak - before) / (4 * elements),
        f"{order}_s": seconds,
        f"{order}_accepted": accepted,
        f"{order}_digest": digest,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="8 sessions")
    parser.add_argument("--transport", default="tcp", help="value of SHOAL_TRANSPORT")
    parser.add_argument("--orders", nargs="*", default=["in_order", "rank_0_last", "backup_workers"])
    args = parser.parse_args()
    count = 8 if args.short else SESSIONS
    row: dict[str, Any] = {"name": "step_memory", "sessions": count, "transport": args.transport}
    for order in args.orders:
        # A new cluster, so that no order begins with the memory of the one before.
        with shoal.LocalCluster(
            servers=1, workers=0, env={"SHOAL_TRANSPORT": args.transport}, flags=_PATIENT
        ) as cluster:
            row |= measured(cluster, order, ELEMENTS, count)
    digests = {row[key] for key in ("in_order_digest", "rank_0_last_digest") if key in row}
    row["same_bits"] = len(digests) <= 1
    print(json.dumps(row))
    return 0 if row["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark of the memory of a server and a worker: python benchmarks/memory.py rest|pull, prints one JSON line.

rest: the resident memory of a server that holds 1 GiB of variables with Adam's two slots. It is read three times: after
      the job is created, after two steps while the session is open, and after the session has ended.
pull: the peak resident memory of the server and of the worker when the worker pulls one variable of 6 GB over TCP.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np

REST_VARIABLES, REST_SHAPE = 64, (4096, 1024)
PULL_BYTES = 6 * 10**9
# With --short, the variables are smaller by about this factor.
_SHORTER = 64
_SETTLE_S = 6.0
MB = 10**6


def status_bytes(pid: int, field: str) -> int:
    """Returns a field of /proc/PID/status in bytes: VmRSS, or VmHWM for the peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found, text
    return int(found[1]) << 10


def rest(*, short: bool) -> dict[str, float]:
    count = REST_VARIABLES // (_SHORTER if short else 1)
    variables = {f"v{number}": shoal.Variable(REST_SHAPE) for number in range(count)}
    with shoal.LocalCluster(servers=1, workers=0) as cluster, cluster.client() as client:
        pid = cluster.process("server").pid
        seen = {}
        mode = shoal.Asynchronous()
        with client.session("rest", variables=variables, optimizer=shoal.optim.Adam(1e-3), consistency=mode) as session:
            seen["created"] = _at_rest(pid)
            for _ in range(2):  # so that every page of the slots has been written, too
                session.push({name: np.full_like(value, 1e-3) for name, value in session.pull().items()})
            seen["open"] = _at_rest(pid)
        seen["ended"] = _at_rest(pid)
    held = sum(3 * variable.nbytes for variable in variables.values())
    return {**{f"{when}_mb": size / MB for when, size in seen.items()}, "limit_mb": (1.05 * held + 300 * MB) / MB}


def _at_rest(pid: int) -> int:
    """Returns the resident bytes after some seconds without calls."""
    time.sleep(_SETTLE_S)
    return status_bytes(pid, "VmRSS")


def pull(*, short: bool) -> dict[str, float]:
    size = PULL_BYTES // (_SHORTER if short else 1)
    transport = {"SHOAL_TRANSPORT": "tcp"}
    with shoal.LocalCluster(servers=1, workers=0, env=transport) as cluster:
        command = [sys.executable, __file__, "worker", "--address", cluster.address, "--bytes", str(size)]
        worker = subprocess.run(command, env={**os.environ, **transport}, stdout=subprocess.PIPE, check=True)
        server = status_bytes(cluster.process("server").pid, "VmHWM")
    return {
        "server_mb": server / MB,
        "worker_mb": json.loads(worker.stdout)["peak_bytes"] / MB,
        "limit_mb": (1.2 * size + 512 * MB) / MB,
    }


def pull_once(address: str, size: int) -> dict[str, int]:
    variables = {"w": shoal.Variable((size // 4,))}
    with (
        shoal.connect(address) as client,
        client.session("large", variables=variables, consistency=shoal.Asynchronous()) as session,
    ):
        values = session.pull()
        if values["w"].nbytes != size or values["w"].any():
            sys.exit("these are not the values of the job")
        return {"peak_bytes": status_bytes(os.getpid(), "VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("rest", "pull", "worker"))
    parser.add_argument("--address", default="", help="of the worker's coordinator")
    parser.add_argument("--bytes", type=int, default=0, help="of the variable that the worker pulls")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    options = parser.parse_args()
    if options.what == "worker":
        print(json.dumps(pull_once(options.address, options.bytes)))
    else:
        print(json.dumps({"rest": rest, "pull": pull}[options.what](short=options.short)))


if __name__ == "__main__":
    main()

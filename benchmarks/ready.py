"""Benchmark of the start of `shoal server`, until its health service reports SERVING: python benchmarks/ready.py.

The first start fills the kernel cache and is not counted. The script prints one JSON line.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shoal

STARTS = 5
PATIENCE_S = 60.0
_POLL_S = 0.005


def seconds_to_ready(coordinator: str, listen: str) -> float:
    """Starts a server and stops it again. Returns the seconds until it served."""
    command = [str(Path(sys.executable).with_name("shoal")), "server", "--coordinator", coordinator]
    began = time.perf_counter()
    server = subprocess.Popen([*command, "--listen", listen, "--log-level", "warning"])
    try:
        while not is_serving(listen):
            if server.poll() is not None or time.perf_counter() - began > PATIENCE_S:
                sys.exit(f"the server was not ready in {PATIENCE_S} s, or ended: {server.poll()}")
            time.sleep(_POLL_S)
        return time.perf_counter() - began
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def is_serving(address: str) -> bool:
    """Asks over a new connection, because a refused connection waits before it tries again."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel, suppress(grpc.RpcError):
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    starts = 1 if parser.parse_args().short else STARTS
    with shoal.LocalCluster(servers=0, workers=0) as cluster:
        times = [seconds_to_ready(cluster.address, f"127.0.0.1:{free_port()}") for _ in range(starts + 1)]
    print(json.dumps({"seconds": statistics.median(times[1:]), "first_seconds": times[0]}))


if __name__ == "__main__":
    main()

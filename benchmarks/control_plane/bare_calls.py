"""The processor time that a bare unary call of grpcio takes a server process, for comparison with a report.

The server of this module is an unmodified grpcio server with a handler that returns some bytes. Many connections call
it at the rate of a large cluster's heartbeats and reports, with messages of their size. So the part of the cost of a
report that is gRPC's own is measured on the same machine, in the same run.
"""

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from members import CHANNEL_OPTIONS
from simulated_members import cpu_s

# As in a run with 1,000 workers and 100 servers: calls a second, and bytes of a report and of its answer.
CALLS_PER_S, REQUEST_BYTES, REPLY_BYTES = 400.0, 120, 20
# Fewer connections than members, but enough that hardly any is used for two calls at a time.
CONNECTIONS = 200
_METHOD = "/bare/Call"
_POLL_S = 0.001


def us_per_bare_call(seconds: float) -> float:
    """Returns the microseconds of processor time of a bare call, measured for some seconds."""
    command = [sys.executable, str(Path(__file__).resolve())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout
            address = f"127.0.0.1:{int(server.stdout.readline())}"
            return asyncio.run(_measure(address, server.pid, seconds))
        finally:
            server.kill()


async def _measure(address: str, server: int, seconds: float) -> float:
    channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for _ in range(CONNECTIONS)]
    methods = [channel.unary_unary(_METHOD) for channel in channels]
    request = bytes(REQUEST_BYTES)
    for method in methods:  # opens the connections
        await method(request)
    used, began, calls = cpu_s(server), time.monotonic(), 0
    running: set[asyncio.Future[Any]] = set()
    while (passed := time.monotonic() - began) < seconds:
        if calls < passed * CALLS_PER_S:
            running.add(call := asyncio.ensure_future(methods[calls % CONNECTIONS](request)))
            call.add_done_callback(running.discard)
            calls += 1
        else:
            await asyncio.sleep(_POLL_S)
    await asyncio.gather(*running)
    used = cpu_s(server) - used
    for channel in channels:
        await channel.close()
    return 1e6 * used / calls


def serve() -> None:
    """Serves until standard input ends. Prints the port."""
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: bytes(REPLY_BYTES))
    server = grpc.server(ThreadPoolExecutor(4))
    service, method = _METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    serve()

"""A process of simulated members of a cluster: python members.py KIND ADDRESS FIRST COUNT SIZE.

`simulated_members` starts it for the benchmarks of the control plane. The process has COUNT members. They speak the
real protocol with a real coordinator. KIND says what they are:

- `servers` keep no shards and agree to everything (`simulated_servers`). SIZE is the number of workers of the job.
- `workers` enter the job that they are assigned to, and report (`simulated_workers`). SIZE is the number of variables
  of the job.
- `sessions` wait to enter a job, and then take one step with real servers (`waiting_sessions`). SIZE is the number of
  variables of the job.

Each line on standard input is a command. The process answers it with one JSON line, which combines the values of its
members. If a name ends with `_s` or `_at`, its value is the largest of the members' values. The other numbers are sums.
Before the first command, the process prints a line when all members are registered. It ends at the end of its input.
"""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from shoal._rpc.channels import CONTROL_OPTIONS
from shoal._security import AccessRole, Credentials, shown

# One connection for each member, as if each were on a host of its own.
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    *CONTROL_OPTIONS,
]
# Calls of one process that register or describe at a time.
CONCURRENT = 16
# grpc's server cancels calls when too many wait for it.
_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
_RETRY_S = 0.2

MembersLine = dict[str, Any]


def say(line: MembersLine) -> None:
    """Prints a JSON line at once."""
    print(json.dumps(line), flush=True)


async def answered(method: Any, request: Any, timeout_s: float | None = 30.0) -> Any:
    """Calls, and repeats the call while the coordinator cannot be reached or has too many calls.

    If this task is cancelled meanwhile, grpc sometimes raises an error of its own.
    """
    task = asyncio.current_task()
    while True:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if task and task.cancelling():
                raise asyncio.CancelledError from error
            if error.code() not in _RETRIED:
                raise
            await asyncio.sleep(_RETRY_S)


@asynccontextmanager
async def channel(address: str, role: AccessRole) -> AsyncIterator["PresentingChannel"]:
    """Opens a connection of its own, whose calls present this machine's token of a role."""
    metadata = Credentials.find().for_coordinator(address, role).metadata()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as opened:
        yield PresentingChannel(opened, metadata)


class PresentingChannel:
    """A channel as far as generated stubs use it. Each call has the given metadata, and the secret of the member."""

    def __init__(self, opened: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._opened, self._metadata = opened, metadata
        self.secret = ""  # of the member that registered through this channel

    def unary_unary(self, *method: Any, **codecs: Any) -> Callable[..., Any]:
        return self._presenting(self._opened.unary_unary(*method, **codecs))

    def unary_stream(self, *method: Any, **codecs: Any) -> Callable[..., Any]:
        return self._presenting(self._opened.unary_stream(*method, **codecs))

    def _presenting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *request, **options: call(*request, metadata=self._metadata + shown(self.secret), **options)


async def obey(handle: Callable[[str], Awaitable[MembersLine]]) -> None:
    """Answers the lines of standard input until its end. It says first that the members are registered."""
    say({"ready": 1})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        say(await handle(line.strip()))


def main() -> None:
    kind, address, first, count, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    # The parent reads standard output.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    match kind:
        case "servers":
            import simulated_servers  # noqa: PLC0415 - each kind imports what it needs

            asyncio.run(simulated_servers.serve(address, first, count, size))
        case "workers":
            import simulated_workers  # noqa: PLC0415

            asyncio.run(simulated_workers.work(address, first, count, size))
        case "sessions":
            import waiting_sessions  # noqa: PLC0415

            waiting_sessions.wait(address, first, count, size)


if __name__ == "__main__":
    sys.modules["members"] = sys.modules["__main__"]  # the kinds import it
    main()

"""Ranks of a group as threads of one process, on loopback."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal._transport import TokenSecurity
from shoal_distribute.collectives import Group

T = TypeVar("T")

SECURITY = TokenSecurity(b"a token of the tests")
PATIENCE_S = 60.0


def sockets(ranks: int) -> list[socket.socket]:
    """Returns a listening socket for each rank."""
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]


def addresses(listening: Sequence[socket.socket]) -> list[str]:
    return [f"127.0.0.1:{it.getsockname()[1]}" for it in listening]


def run_ranks(ranks: int, work: Callable[[Group], T], *, share: bool = True) -> list[T | BaseException]:
    """Runs a function as each rank of a group, and returns the results or errors by rank."""
    listening = sockets(ranks)
    at = addresses(listening)
    results: list[T | BaseException] = [AssertionError("it did not end")] * ranks

    def run(rank: int) -> None:
        try:
            with Group.open(rank, at, security=SECURITY, listening=listening[rank], share=share) as group:
                results[rank] = work(group)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return results


def succeeded(results: Sequence[T | BaseException]) -> list[T]:
    """Returns the results; raises the first error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]

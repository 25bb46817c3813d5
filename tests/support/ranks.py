"""Ranks of a group as threads of one process, on loopback."""

import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shoal._transport import SHM, TokenSecurity
from shoal_distribute.collectives import Group

T = TypeVar("T")

SECURITY = TokenSecurity(b"a token of the tests")
PATIENCE_S = 60.0


def sockets(ranks: int) -> list[socket.socket]:
    """Returns a listening socket for each rank."""
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]


def addresses(listening: Sequence[socket.socket]) -> list[str]:
    return [f"127.0.0.1:{it.getsockname()[1]}" for it in listening]


def run_ranks(
    ranks: int, work: Callable[[Group], T], *, share: bool = True, hosts: Sequence[int] = ()
) -> list[T | BaseException]:
    """Runs a function as each rank of a group, and checks that no shared memory is left.

    Args:
        ranks: number of ranks.
        work: the function.
        share: whether they use shared memory.
        hosts: the number of each rank's host, from 0; by default, all are on one. As containers, ranks of different
            hosts have different folders for shared memory.

    Returns:
        The results or errors by rank.
    """
    listening = sockets(ranks)
    at = addresses(listening)
    results: list[T | BaseException] = [AssertionError("it did not end")] * ranks

    def run(rank: int, folder: Path) -> None:
        try:
            with Group.open(
                rank, at, security=SECURITY, listening=listening[rank], share=share, directory=folder
            ) as group:
                results[rank] = work(group)
        except BaseException as error:
            results[rank] = error

    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        of_ranks = [Path(folder, str(host)) for host in hosts or [0] * ranks]
        for each in of_ranks:
            each.mkdir(exist_ok=True)
        threads = [threading.Thread(target=run, args=it, daemon=True) for it in enumerate(of_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not [*Path(folder).glob("*/*")]
    return results


def succeeded(results: Sequence[T | BaseException]) -> list[T]:
    """Returns the results; raises the first error."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]

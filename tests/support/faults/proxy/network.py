"""Network of proxies, with a thread that forwards the bytes of all of them."""

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TypeVar

from support.faults.proxy.proxy import Proxy

T = TypeVar("T")
_CALL_S = 10.0


class Network(Mapping[str, Proxy]):
    """The links between processes, by name. It is a context manager, whose end closes all of them.

    Args:
        seed: seed of all random choices. Which bytes they meet depends on the processes, so a seed repeats the faults
            only approximately.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._proxies: dict[str, Proxy] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def __getitem__(self, name: str) -> Proxy:
        return self._proxies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._proxies)

    def __len__(self) -> int:
        return len(self._proxies)

    def proxy(self, name: str, target: str, listen: str = "127.0.0.1:0") -> Proxy:
        """Adds a link.

        Args:
            name: its name, which is unique.
            target: host:port that it forwards to. Nothing needs to listen there yet.
            listen: host:port that it accepts connections on.

        Returns:
            Its proxy, which accepts connections.
        """
        assert name not in self._proxies, f"there is a link {name}"
        host, _, port = listen.rpartition(":")
        listening = socket.create_server((host, int(port)), backlog=128)
        chance = random.Random(f"{self._seed} {name}")
        made = Proxy(name, target, listening, chance, self._loop, self._call)
        asyncio.run_coroutine_threadsafe(made.start(), self._loop).result(_CALL_S)
        self._proxies[name] = made
        return made

    def heal(self) -> None:
        """Ends the faults of all links."""
        for link in self._proxies.values():
            link.heal()

    def close(self) -> None:
        """Closes all links and their connections."""
        if self._loop.is_closed():
            return
        for link in self._proxies.values():
            asyncio.run_coroutine_threadsafe(link.stop(), self._loop).result(_CALL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()

    def _call(self, function: Callable[[], T]) -> T:
        async def called() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(_CALL_S)

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Network"]

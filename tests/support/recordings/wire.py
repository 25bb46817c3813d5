"""Inputs of scenarios: the addresses that clients call, and hooks between two calls."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from shoal import errors
from shoal._rpc import channel
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub


@dataclass
class Wire:
    """The addresses that clients call, and the hooks that run between two calls.

    Attributes:
        addresses: by name: "server-0", "server-1", "coordinator".
        mark: marks that all calls so far have ended.
        advance: advances the coordinator's clock.
    """

    addresses: Mapping[str, str]
    mark: Callable[[], None] = lambda: None
    advance: Callable[[float], None] = lambda _: None
    stack: ExitStack = field(default_factory=ExitStack)

    def stubs(self, count: int) -> list[ParameterServerStub]:
        """Returns the stubs of the first servers, as the coordinator uses them."""
        channels = [self.stack.enter_context(channel(self.addresses[f"server-{index}"])) for index in range(count)]
        return [ParameterServerStub(it) for it in channels]

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@contextmanager
def refused(kind: type[errors.ShoalError]) -> Iterator[None]:
    """Checks that the block ends with this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

"""Registry of transport endpoints, and the group of all endpoints of one server."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from shoal import errors
from shoal._system import Registry
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.service import DataService

_registry: Registry[EndpointFactory] = Registry("shoal.endpoints")


def register(factory: EndpointFactory) -> None:
    """Registers a transport's server half in this process; replaces one of the same name.

    An installed package can add one to every server with an entry point in the group `shoal.endpoints`.

    Args:
        factory: makes the endpoint for each server that is created from now on.
    """
    _registry.register(factory)


def unregister(name: str) -> None:
    """Removes the server half of this name, if there is one."""
    _registry.unregister(name)


class EndpointGroup(Endpoint):
    """All registered endpoints of one server.

    Args:
        service: carries out the calls.
        config: the server's configuration.

    Raises:
        StartFailed: a transport of an installed package cannot be loaded.
        PortInUse: a transport's port is taken.
    """

    def __init__(self, service: DataService, config: EndpointConfig) -> None:
        self._all: dict[str, Endpoint] = {}
        with ExitStack() as undo:
            for factory in _registry.items():
                self._all[factory.name] = endpoint = factory.make(service, config)
                undo.callback(endpoint.stop)
            undo.pop_all()

    def __getitem__(self, name: str) -> Endpoint:
        return self._all[name]

    def contribute(self, offer: pb.AttachReply) -> None:
        for endpoint in self._all.values():
            endpoint.contribute(offer)

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {}
        for name, endpoint in self._all.items():
            handlers = endpoint.handlers()
            if twice := found.keys() & handlers.keys():
                raise errors.InternalError(
                    f"transport {name} handles {', '.join(sorted(twice))}, as another transport does"
                )
            found |= handlers
        return found

    def start(self, address: str) -> None:
        for endpoint in self._all.values():
            endpoint.start(address)

    def end_stalled(self) -> None:
        for endpoint in self._all.values():
            endpoint.end_stalled()

    def end_refused(self) -> None:
        for endpoint in self._all.values():
            endpoint.end_refused()

    def stop(self) -> None:
        for endpoint in self._all.values():
            endpoint.stop()


__all__ = ["EndpointGroup", "register", "unregister"]

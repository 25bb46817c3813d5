"""The registry of transports, and the values of SHOAL_TRANSPORT that they answer to."""

import os

from shoal import errors
from shoal._system import Registry
from shoal._transport.transport import TransportFactory

_SETTINGS = ("auto", "tcp", "grpc")

_registry: Registry[TransportFactory] = Registry("shoal.transports")


def register(factory: TransportFactory) -> None:
    """Adds a transport to this process; one of the same name is replaced.

    An installed package adds a transport to every process by an entry point in the group `shoal.transports`.

    Args:
        factory: opens it; used by connections that are made from now on.
    """
    _registry.register(factory)


def unregister(name: str) -> None:
    """Removes the transport of this name, if there is one."""
    _registry.unregister(name)


def registered(setting: str) -> list[TransportFactory]:
    """Returns the transports that a setting allows, in order of rank.

    Raises:
        BadRequest: it allows none.
        StartFailed: a transport of an installed package cannot be loaded.
    """
    factories = _registry.items()
    found = [factory for factory in factories if setting in factory.settings]
    if not found:
        known = sorted({name for factory in factories for name in factory.settings})
        raise errors.BadRequest(f"no transport is registered for {setting!r}; choose one of {', '.join(known)}")
    return sorted(found, key=lambda factory: (factory.rank, factory.name))


def chosen_setting() -> str:
    """Returns what SHOAL_TRANSPORT in the environment allows: auto, tcp (no shared memory), grpc (no lanes either).

    Registered transports may add settings of their own.

    Raises:
        BadRequest: it is something else.
        StartFailed: as `registered`.
    """
    setting = os.environ.get("SHOAL_TRANSPORT") or "auto"
    if setting in _SETTINGS:
        return setting
    others = {name for factory in _registry.items() for name in factory.settings} - {*_SETTINGS}
    *names, last = (*_SETTINGS, *sorted(others))
    if setting not in (*names, last):
        raise errors.BadRequest(
            f"SHOAL_TRANSPORT is {setting!r}; set it to {', '.join(names)} or {last}, or not at all"
        )
    return setting


__all__ = ["chosen_setting", "register", "registered", "unregister"]

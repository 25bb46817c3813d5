"""Registry of transports, selected by the values of SHOAL_TRANSPORT."""

import os

from shoal import errors
from shoal._system import Registry
from shoal._transport.transport import TransportFactory

_SETTINGS = ("auto", "tcp", "grpc")

TRANSPORTS: Registry[TransportFactory] = Registry("shoal.transports")


def register(factory: TransportFactory) -> None:
    """Adds a transport to this process, or replaces the one of the same name.

    To add a transport to every process, an installed package declares an entry point in the group `shoal.transports`.

    Args:
        factory: opens the transport, on connections that are made from now on.
    """
    TRANSPORTS.register(factory)


def unregister(name: str) -> None:
    """Removes the transport of this name, if there is one."""
    TRANSPORTS.unregister(name)


def registered(setting: str) -> list[TransportFactory]:
    """Returns the transports that a setting allows, in order of rank.

    Raises:
        BadRequest: the setting allows none.
        StartFailed: a transport of an installed package cannot be loaded.
    """
    factories = TRANSPORTS.items()
    found = [factory for factory in factories if setting in factory.settings]
    if not found:
        known = sorted({name for factory in factories for name in factory.settings})
        raise errors.BadRequest(f"no transport is registered for {setting!r}; choose one of {', '.join(known)}")
    return sorted(found, key=lambda factory: (factory.rank, factory.name))


def chosen_setting() -> str:
    """Returns the value of SHOAL_TRANSPORT: auto, tcp (no shared memory) or grpc (no lanes either).

    Registered transports may add values.

    Raises:
        BadRequest: the value is unknown.
        StartFailed: as for `registered`.
    """
    setting = os.environ.get("SHOAL_TRANSPORT") or "auto"
    if setting in _SETTINGS:
        return setting
    others = {name for factory in TRANSPORTS.items() for name in factory.settings} - {*_SETTINGS}
    *names, last = (*_SETTINGS, *sorted(others))
    if setting not in (*names, last):
        raise errors.BadRequest(
            f"SHOAL_TRANSPORT is {setting!r}; set it to {', '.join(names)} or {last}, or not at all"
        )
    return setting


__all__ = ["chosen_setting", "register", "registered", "unregister"]

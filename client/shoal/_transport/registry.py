"""The registry of transports, in the order of preference."""

import os

from shoal import errors
from shoal._transport.lane_calls import LaneFactory
from shoal._transport.rpc_transport import GrpcFactory
from shoal._transport.shared_memory import SharedMemoryFactory
from shoal._transport.transport import TransportFactory

_SETTINGS = ("auto", "tcp", "grpc")

# The best first. Changed only by `register`, which exchanges it, so that nobody reads it half-changed.
_factories: tuple[TransportFactory, ...] = (SharedMemoryFactory(), LaneFactory(), GrpcFactory())


def register(factory: TransportFactory, *, before: str = "") -> None:
    """Adds a transport, in place of one of the same name.

    Args:
        factory: opens it.
        before: name of the transport that it is preferred to; empty: it comes last.

    Raises:
        BadRequest: no transport is registered by the name in `before`.
    """
    global _factories  # noqa: PLW0603 - one registry a process
    others = [other for other in _factories if other.name != factory.name]
    names = [other.name for other in others]
    if before and before not in names:
        raise errors.BadRequest(f"no transport {before!r} is registered; choose one of {', '.join(names)}")
    place = names.index(before) if before else len(others)
    _factories = (*others[:place], factory, *others[place:])


def unregister(name: str) -> None:
    """Removes a transport; harmless if there is none of that name."""
    global _factories  # noqa: PLW0603 - as above
    _factories = tuple(factory for factory in _factories if factory.name != name)


def registered(setting: str) -> list[TransportFactory]:
    """Returns the transports that a setting allows, the best first.

    Raises:
        BadRequest: it allows none.
    """
    found = [factory for factory in _factories if setting in factory.settings]
    if not found:
        known = sorted({name for factory in _factories for name in factory.settings})
        raise errors.BadRequest(f"no transport is registered for {setting!r}; choose one of {', '.join(known)}")
    return found


def chosen_setting() -> str:
    """Returns what SHOAL_TRANSPORT in the environment allows: auto, tcp (no shared memory), grpc (no lanes either).

    Registered transports may add settings of their own.

    Raises:
        BadRequest: it is something else.
    """
    setting = os.environ.get("SHOAL_TRANSPORT") or "auto"
    others = {name for factory in _factories for name in factory.settings} - {*_SETTINGS}
    *names, last = (*_SETTINGS, *sorted(others))
    if setting not in (*names, last):
        raise errors.BadRequest(
            f"SHOAL_TRANSPORT is {setting!r}; set it to {', '.join(names)} or {last}, or not at all"
        )
    return setting


__all__ = ["chosen_setting", "register", "registered", "unregister"]

"""The caller of the call that a thread handles, on any transport."""

import contextvars

from shoal._security import Principal

_caller: contextvars.ContextVar[Principal | None] = contextvars.ContextVar("caller", default=None)


def caller() -> Principal | None:
    """Returns who makes the call that this thread handles; None if the cluster does not ask for tokens."""
    return _caller.get()


def set_caller(principal: Principal | None) -> None:
    """Sets the caller in the current context: that of a call by gRPC, or that of a lane's thread."""
    _caller.set(principal)


__all__ = ["caller", "set_caller"]

"""What calls of tests present to a cluster that asks for tokens."""

from shoal._security import AccessRole, Credentials


def as_admin(address: str) -> Credentials:
    """Returns the credentials of this user's processes on this machine.

    Args:
        address: host:port of the coordinator.
    """
    return Credentials().for_coordinator(address, AccessRole.ADMIN)


__all__ = ["as_admin"]

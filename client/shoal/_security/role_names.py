"""Names of roles in certificates: the DNS names by which clients know that a process is a coordinator or a server.

A host does not say which role its process has: the certificate of a worker also names hosts. So a client over gRPC or a
lane checks this name instead of the host. `internal` is a domain for private use, so no public CA issues such a name.
"""

from shoal._security.principal import AccessRole

ROLE_DOMAIN = "role.shoal.internal"
# The roles that others call over gRPC or lanes.
NAMED_ROLES = (AccessRole.COORDINATOR, AccessRole.SERVER)


def role_name(role: AccessRole) -> str:
    """Returns the DNS name that the certificate of a role must have, such as `server.role.shoal.internal`."""
    return f"{role.value}.{ROLE_DOMAIN}"


def is_role_name(host: str) -> bool:
    """Returns whether a DNS name, which may have a wildcard, is one of a role rather than of a host."""
    return f".{host.lower().rstrip('.')}".endswith(f".{ROLE_DOMAIN}")


__all__ = ["NAMED_ROLES", "ROLE_DOMAIN", "is_role_name", "role_name"]

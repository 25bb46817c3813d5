"""The users whose processes listen on a TCP port of this machine.

The process that listens on a port of loopback receives what a client sends to it. So a client asks this module who
listens before it sends a secret. Linux finds the listener of one port (`socket_diag`). Where it does not, for example
in a sandbox, this module reads its tables `/proc/net/tcp` and `/proc/net/tcp6` (proc(5)).
"""

import sys
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from shoal._system.socket_diag import listening_user

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_Address = IPv4Address | IPv6Address
_LISTEN = "0A"
_LOCALHOST = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


def loopback_addresses(host: str) -> tuple[_Address, ...]:
    """Returns the loopback addresses that a client may connect to for a host. There are none for other hosts.

    Args:
        host: a host name or an IP address, which may be in brackets. Only `localhost` and names that end in
            `.localhost` (RFC 6761) are names of loopback. They stand for 127.0.0.1 and for ::1.
    """
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        name = host.lower().rstrip(".")
        return _LOCALHOST if name == "localhost" or name.endswith(".localhost") else ()
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return (address,) if address.is_loopback else ()


def users_in(table: str, address: _Address, port: int) -> frozenset[int]:
    """Returns the ids of the users whose listening sockets accept a connection to an address.

    A socket that is bound to the address itself comes before one that is bound to all addresses, and among these an
    IPv4 socket comes before an IPv6 socket. This is the order in which Linux chooses (`inet_lookup_listener`). Only the
    users of the first kind that is there are returned. Sockets of other addresses do not count.

    Args:
        table: the text of both tables, one after the other.
        address: the address that a client connects to.
        port: the port.

    Returns:
        The user ids. There are none if nothing listens.
    """
    users: dict[int, set[int]] = {}
    kinds = {f"{local}:{port:04X}": rank for rank, kind in enumerate(_kinds(address)) for local in kind}
    suffix = f":{port:04X} "
    for line in table.splitlines():
        if suffix not in line:  # nearly all lines
            continue
        # Number, local address, remote address, state, queues, timer, retransmissions, user id, and more.
        fields = line.split(None, 8)
        if len(fields) > 7 and fields[3] == _LISTEN and fields[1] in kinds and fields[7].isdecimal():
            users.setdefault(kinds[fields[1]], set()).add(int(fields[7]))
    return frozenset(users[min(users)]) if users else frozenset()


def listening_users(host: str, port: int) -> frozenset[int]:
    """Returns the ids of the users who receive what a client sends to a port of loopback.

    Args:
        host: the host that the client connects to.
        port: the port.

    Returns:
        The user ids. There are none if nothing listens, if the host is not loopback, or if this system does not tell.
    """
    return frozenset().union(*(_users(address, port) for address in loopback_addresses(host)))


def users_in_tables(host: str, port: int, tables: Sequence[Path] = TABLES) -> frozenset[int]:
    """Returns the same as `listening_users`, from the socket tables alone. It takes some ms.

    Args:
        host: the host that the client connects to.
        port: the port.
        tables: the files with the socket tables.
    """
    addresses = loopback_addresses(host)
    text = "".join(map(_text, tables)) if addresses else ""
    return frozenset().union(*(users_in(text, address, port) for address in addresses))


def _users(address: _Address, port: int) -> frozenset[int]:
    try:
        user = listening_user(address, port)
    except OSError:
        user = None
    # None may also mean that this kernel has no module for the request. If nothing listens, the ms do not matter.
    return users_in_tables(str(address), port) if user is None else frozenset([user])


def _kinds(address: _Address) -> list[list[str]]:
    """Returns the local addresses that accept a connection to an address, by the order in which Linux chooses.

    They are written as in the tables. An IPv6 socket may also be bound to an IPv4 address (RFC 4291, 2.5.5.2).
    """
    anywhere = IPv6Address("::")
    if isinstance(address, IPv4Address):
        any_v4 = IPv4Address(0)
        kinds: list[list[_Address]] = [[address, _mapped(address)], [any_v4], [_mapped(any_v4), anywhere]]
    else:
        kinds = [[address], [anywhere]]
    return [[_hexadecimal(each) for each in kind] for kind in kinds]


def _mapped(address: IPv4Address) -> IPv6Address:
    return IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)


def _hexadecimal(address: _Address) -> str:
    """Returns an address as the tables have it: each 32 bits as a number in the byte order of this machine."""
    words = (address.packed[first : first + 4] for first in range(0, len(address.packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _text(table: Path) -> str:
    try:
        return table.read_text("ascii", errors="replace")
    except OSError:  # another system, or /proc is not mounted
        return ""


__all__ = ["TABLES", "listening_users", "loopback_addresses", "users_in", "users_in_tables"]

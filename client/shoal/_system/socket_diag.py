"""The listening socket that accepts a connection, as Linux's kernel itself finds it (sock_diag(7)).

One request takes about 10 us, however many sockets the machine has. Reading `/proc/net/tcp` takes some ms, because the
kernel walks its whole table of connections.
"""

import errno
import socket
import struct
from ipaddress import IPv4Address, IPv6Address

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_TCP_LISTEN = 10

# Structures of the kernel's headers netlink.h and inet_diag.h.
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI")  # inet_diag_req_v2 without its id: family, protocol, extensions, padding, states
_SOCKET_ID = struct.Struct("!HH16s16s4s8s")  # inet_diag_sockid: ports, addresses, interface, cookie
_REPLY = struct.Struct("=BBBB")  # inet_diag_msg: family, state, timer, retransmissions; then the id
_REST = struct.Struct("=IIIII")  # after the id: expires, receive queue, send queue, user id, inode
_ERROR = struct.Struct("=i")
_ALL_STATES = 0xFFFFFFFF
_ANY = bytes(16)
_ANY_INTERFACE = bytes(4)
_NO_COOKIE = b"\xff" * 8
_REPLY_BYTES = 4096


def listening_user(address: IPv4Address | IPv6Address, port: int) -> int | None:
    """Returns the id of the user whose socket accepts a connection, or None if there is no such socket.

    Args:
        address: the address that a client connects to.
        port: the port.

    Raises:
        OSError: the kernel answers no such request.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    # As for a packet from anywhere to the address: the kernel's lookup then ends at the socket that listens.
    wanted = _SOCKET_ID.pack(port, 0, address.packed.ljust(16, b"\0"), _ANY, _ANY_INTERFACE, _NO_COOKIE)
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + wanted
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    netlink = getattr(socket, "AF_NETLINK", None)
    if netlink is None:
        raise OSError(errno.EAFNOSUPPORT, "this system has no netlink sockets")
    with socket.socket(netlink, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.sendto(header + body, (0, 0))
        reply = kernel.recv(_REPLY_BYTES)
    return _user(reply)


def _user(reply: bytes) -> int | None:
    """Returns the user id in the kernel's reply, or None if the reply says that there is no such socket."""
    try:
        _, kind, *_ = _HEADER.unpack_from(reply)
        if kind == _NLMSG_ERROR:
            (code,) = _ERROR.unpack_from(reply, _HEADER.size)
            if code == -errno.ENOENT:
                return None
            raise OSError(-code, "the kernel refused a request for a socket")
        _, state, *_ = _REPLY.unpack_from(reply, _HEADER.size)
        *_, user, _ = _REST.unpack_from(reply, _HEADER.size + _REPLY.size + _SOCKET_ID.size)
    except struct.error:
        raise OSError(errno.EPROTO, "the kernel's reply is too short") from None
    return int(user) if state == _TCP_LISTEN else None


__all__ = ["listening_user"]

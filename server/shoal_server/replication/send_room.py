"""Send room: how much a socket takes without a wait, so that a call need not leave its bytes to another thread."""

import fcntl
import os
import select
import socket
import struct
import termios


class SendRoom:
    """The room in the send buffer of a connection.

    Args:
        descriptor: of the connected socket. This object has a duplicate of it.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)

    def takes(self, nbytes: int) -> bool:
        """Returns whether the socket takes so many bytes now without a wait. Only one thread may send.

        Args:
            nbytes: the bytes. 0 means any small frame: if the kernel calls a socket writable, a third of its buffer is
                free.
        """
        try:
            if not self._writable.poll(0):
                return False
            if not nbytes:
                return True
            # The kernel counts its own overhead, too, for which it adds as much again to the size of the buffer.
            room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
            (queued,) = struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):  # closed meanwhile: the sender is told so
            return False
        return nbytes <= room - int(queued)

    def close(self) -> None:
        """Closes the duplicate. May be called twice."""
        self._socket.close()


__all__ = ["SendRoom"]

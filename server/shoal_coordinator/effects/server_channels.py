"""Channels to servers, which are kept between calls, and the list of servers that do not answer."""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal import _rpc, _tracing, errors
from shoal._security import NO_CREDENTIALS, AccessRole, Credentials
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal_coordinator.messages import ServerRef

# Number of channels that are kept between calls. More channels may be in use at the same time.
MAX_CHANNELS = 1_024
# Returns what the coordinator presents to the server with a member id.
CredentialsFor = Callable[[str], Credentials]


def no_credentials(server: str) -> Credentials:  # noqa: ARG001 - the same for all servers
    """Returns credentials without TLS and without a token."""
    return NO_CREDENTIALS


@dataclass(eq=False, slots=True)
class LentChannel:
    """A channel while a call uses it. The caller gives it back.

    Attributes:
        server: the server at its other end.
        stub: made together with the channel, because no stub may be made after the channel is closed.
        incarnation: the server's incarnation when the channel was made.
        users: number of calls that use it. Guarded by the lock of `ServerChannels`.
    """

    server: ServerRef
    stub: ParameterServerStub
    incarnation: int
    _channel: Any
    users: int = 0

    def close(self) -> None:
        """Ends its calls."""
        self._channel.close()


class ServerChannels:
    """A channel for each server that was called, until the server's incarnation ends.

    A channel belongs to one incarnation at one address: a server that comes back gets a new one. Closing a channel also
    ends its calls, which nobody would answer.

    Args:
        incarnation_of: Returns the incarnation of a live server at this address, or 0.
        most: The number of channels that are kept.
        credentials_for: Returns what the coordinator presents to a server, by its member id.
    """

    def __init__(
        self,
        incarnation_of: Callable[[ServerRef], int],
        most: int = MAX_CHANNELS,
        credentials_for: CredentialsFor = no_credentials,
    ) -> None:
        self._incarnation_of, self._most, self._credentials_for = incarnation_of, most, credentials_for
        self._lock = threading.Lock()  # guards all below and the numbers of users; no other lock is taken under it
        self._channels: dict[ServerRef, LentChannel] = {}  # the least recently used first
        self._silent: set[ServerRef] = set()

    def __len__(self) -> int:
        return len(self._channels)

    def metadata(self, server: ServerRef) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call to a server: the trace of this thread, and the coordinator's token for it.

        Raises:
            Unreachable: Another host, or another user on the server's port, would get the token without TLS.
        """
        credentials = self._credentials_for(server.member)
        try:
            presented = credentials.metadata(credentials.port_check(server.address))
        except errors.Unauthenticated as error:  # the server is down, and may return
            raise errors.Unreachable(error.message, address=server.address) from None
        return *(_tracing.metadata() or ()), *presented

    def borrow(self, server: ServerRef) -> LentChannel:
        """Returns the channel to a server, for one call. `give_back` must follow.

        Raises:
            Cancelled: The server is gone, or has another address now.
        """
        incarnation = self._incarnation_of(server)
        if not incarnation:
            raise errors.Cancelled(f"server {server.member} at {server.address} is gone")
        with self._lock:
            found = self._channels.pop(server, None)
            closed = [found] if found and found.incarnation != incarnation else []
            if found is None or closed:
                channel = _rpc.channel(server.address, self._credentials_for(server.member), AccessRole.SERVER)
                found = LentChannel(server, ParameterServerStub(channel), incarnation, channel)
            self._channels[server] = found
            found.users += 1
            closed += self._over_the_limit()
        for each in closed:
            each.close()
        return found

    def give_back(self, lent: LentChannel) -> None:
        """Ends the use of a channel by one call."""
        with self._lock:
            lent.users -= 1

    def keep_only(self, live: Mapping[ServerRef, int]) -> None:
        """Closes the channels to servers that are gone.

        Args:
            live: The incarnations of the live servers.
        """
        with self._lock:
            gone = [it for it in self._channels.values() if live.get(it.server) != it.incarnation]
            for each in gone:
                del self._channels[each.server]
            self._silent &= live.keys()
        for each in gone:
            each.close()

    def close(self) -> None:
        """Closes all channels."""
        self.keep_only({})

    # Servers that do not answer.

    def mark_silent(self, server: ServerRef) -> None:
        """Notes that a server did not answer a call in time. `answered` takes that back."""
        with self._lock:
            self._silent.add(server)

    def answered(self, server: ServerRef) -> None:
        """Notes that a server has answered."""
        if self._silent:  # without the lock, as it is nearly always empty
            with self._lock:
                self._silent.discard(server)

    def any_silent(self, servers: Collection[ServerRef]) -> bool:
        """Returns whether any of the servers did not answer its last call in time."""
        if not self._silent:
            return False
        with self._lock:
            return not self._silent.isdisjoint(servers)

    def _over_the_limit(self) -> list[LentChannel]:
        """Takes out the channels above the limit that no call uses. Called with the lock."""
        surplus = max(0, len(self._channels) - self._most)
        idle = [it for it in self._channels.values() if not it.users][:surplus] if surplus else []
        for each in idle:
            del self._channels[each.server]
        return idle


__all__ = ["MAX_CHANNELS", "CredentialsFor", "LentChannel", "ServerChannels", "no_credentials"]

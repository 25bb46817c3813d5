"""Selection of a client's transport to one server: the best one that works."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from shoal import _rpc, errors
from shoal._system import ENTROPY
from shoal._system.logs import Log
from shoal._transport.registry import registered
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable
from shoal.v1 import parameter_server_pb2 as pb

_log = Log(__name__)

# Seconds from a refusal until a transport is tried again: the first time, and at most. Attempts run beside the calls.
# The pauses keep all clients of a server that is at its limit from asking it each second.
FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0


@dataclass(slots=True)
class _Refusal:
    """A transport or carrier that was refused.

    Attributes:
        backoff: pauses between attempts.
        until: when it may be tried again.
    """

    backoff: _rpc.Backoff
    until: float


class Selector:
    """Opens transports to one server. Only one thread may use it at a time, except for `open_first`.

    When a transport breaks, the selector opens another one, the best first. It skips transports that the server
    does not offer, and those that were refused a short time ago. A server that answers by gRPC refuses a transport
    because of a firewall, or because it has reached its limit of lanes. Lanes may become free, so `again` says when
    refused transports are tried again: after 5 s, then after pauses that double up to 300 s. If none is left, the next
    `open` tries all of them.

    Args:
        setting: selects transports, as SHOAL_TRANSPORT does.
        clock: a monotonic clock, in seconds.
        jitter: returns a random number in [0, 1) for each pause.
    """

    def __init__(
        self,
        setting: str,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = ENTROPY.random,
    ) -> None:
        self._factories = registered(setting)
        self._clock, self._jitter = clock, jitter
        self._missing: set[str] = set()  # carriers that the server does not offer
        # Transports that do not suit this connection. To try them would use up the pauses of the other direction.
        self._unfit: set[str] = set()
        self._refusals: dict[str, _Refusal] = {}  # by carrier, or by the name of a transport
        self._places: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()  # places of the transports' factories

    def due(self, current: Transport | None) -> bool:
        """Returns whether a new transport must replace this one."""
        return current is None or current.broken

    def is_content(self, current: Transport) -> bool:
        """Whether `again` would return nothing for this transport, because no better one was refused or lost."""
        return not self._refusals and not current.lost

    def again(self, current: Transport) -> list[TransportFactory]:
        """Returns the transports to try again now, the best first, and begins the next pause of each.

        Args:
            current: the transport in use, which stays in use if the attempt fails.

        Returns:
            Transports that are better than this one. There are none if no better one was refused, or if the pauses are
            not over yet.
        """
        if self.is_content(current):
            return []
        place = self.place(current)
        better = [
            it for it in self._factories[:place] if it.carrier not in self._missing and it.name not in self._unfit
        ]
        if current.lost and better and better[-1].name not in self._refusals:
            self._refuse(better[-1].name)
        now = self._clock()
        names = {name for factory in better for name in (factory.name, factory.carrier)}
        over = [name for name in names if name in self._refusals and self._refusals[name].until <= now]
        if not over:
            return []
        found = [it for it in better if not (self._paused(it.name, now) or self._paused(it.carrier, now))]
        for name in over:
            self._refuse(name)
        return found

    def place(self, transport: Transport) -> int:
        """Returns the place of a transport: 0 is the best one. One that has lost its memory is one place worse."""
        return self._places.get(transport, 0) + bool(transport.lost)

    def open_first(self, factories: Sequence[TransportFactory], target: Target, payloads: int) -> Transport | None:
        """Opens the first of these transports that works. Any thread may call it.

        Args:
            factories: from `again`.
            target, payloads: as for `open`.

        Returns:
            The transport; None if none works.
        """
        offer: pb.AttachReply | None = None
        for factory in factories:
            try:
                if factory.attaches and offer is None:
                    offer = target.rpc.attach()
                    target = replace(target, offer=offer)
                transport = factory.open(target, payloads)
            except (TransportUnavailable, errors.ShoalError) as error:
                if isinstance(error, TransportUnavailable) and not error.passing:
                    self._unfit.add(factory.name)
                _log.debug(f"could not open {factory.title} to a server again", server=target.address, why=str(error))
                continue
            self._places[transport] = self._factories.index(factory)
            return transport
        return None

    def open(self, target: Target, payloads: int) -> Transport:
        """Opens the best transport that the server has for this client.

        Args:
            target: the server.
            payloads: as for `TransportFactory.open`.

        Returns:
            The transport.

        Raises:
            Unreachable: the server does not send its offer, or none of its transports works.
            ShoalError: error of the last transport.
        """
        offer: pb.AttachReply | None = None
        refused = why = ""
        missing: list[str] = []
        for place, factory in enumerate(self._factories):
            if factory.carrier in self._missing or self._paused(factory.carrier, self._clock()):
                continue
            if factory.attaches and offer is None:
                offer = target.rpc.attach()
                target = replace(target, offer=offer)
            if refused:
                text = f"no {refused} to a server; calls to it use {factory.title}, which is slower"
                _log.warning(text, server=target.address, why=why)
                refused = ""
            try:
                transport = factory.open(target, payloads)
            except TransportUnavailable as unavailable:
                missing.append(f"{factory.title}: {unavailable}")
                if unavailable.for_good:
                    self._missing.add(factory.carrier)
                elif unavailable.passing:
                    self._refuse(factory.name)
                else:
                    self._unfit.add(factory.name)
            except errors.ShoalError as error:
                if target.opening.closed:
                    raise
                self._refuse(factory.carrier)
                if self._none_left():
                    self._forget()  # the caller's next attempt tries all of them
                    raise
                # Not the error itself: its traceback would keep this call's memory alive.
                refused, why = factory.carrier, error.message
            else:
                self._places[transport] = place
                return transport
        self._forget()
        why = f" ({'; '.join(missing)})" if missing else ""
        raise errors.Unreachable(f"{target.address} has no transport for this client{why}", address=target.address)

    def _refuse(self, name: str) -> None:
        """Begins a pause of a carrier, or of a transport. It is longer than the last one, unless that was long ago."""
        now = self._clock()
        if self._paused(name, now):
            return  # the other direction was refused as well
        refusal = self._refusals.get(name)
        if refusal is None or now - refusal.until > _LONGEST_RETRY_S:
            backoff = _rpc.Backoff(self._jitter, first_s=FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S)
            self._refusals[name] = refusal = _Refusal(backoff, now)
        refusal.until = now + refusal.backoff.next()

    def _paused(self, name: str, now: float) -> bool:
        return name in self._refusals and self._refusals[name].until > now

    def _none_left(self) -> bool:
        now = self._clock()
        return all(it.carrier in self._missing or self._paused(it.carrier, now) for it in self._factories)

    def _forget(self) -> None:
        self._missing.clear()
        self._unfit.clear()
        self._refusals.clear()


__all__ = ["Selector"]

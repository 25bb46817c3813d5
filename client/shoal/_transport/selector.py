"""Selection of a client's transport to one server: the best one that works."""

from dataclasses import replace

import structlog

from shoal import errors
from shoal._transport.registry import registered
from shoal._transport.transport import Target, Transport, TransportUnavailable
from shoal.v1 import parameter_server_pb2 as pb

_log = structlog.get_logger(__name__)


class Selector:
    """Opens transports to one server. Only one thread may use it at a time.

    When a transport breaks, the selector opens another one, the best first. It does not retry a carrier that the server
    refused or does not offer. Since the server does answer by gRPC, the cause is a firewall or the server's limit of
    lanes, and neither is expected to change. If no transport is left, the next `open` tries all of them.

    Args:
        setting: selects transports, as SHOAL_TRANSPORT does.
    """

    def __init__(self, setting: str) -> None:
        self._factories = registered(setting)
        self._refused: set[str] = set()

    def due(self, current: Transport | None) -> bool:
        """Returns whether a new transport must replace this one."""
        return current is None or current.broken

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
        for factory in self._factories:
            if factory.carrier in self._refused:
                continue
            if factory.attaches and offer is None:
                offer = target.rpc.attach()
                target = replace(target, offer=offer)
            if refused:
                text = f"no {refused} to a server; calls to it use {factory.title}, which is slower"
                _log.warning(text, server=target.address, why=why)
                refused = ""
            try:
                return factory.open(target, payloads)
            except TransportUnavailable as unavailable:
                missing.append(f"{factory.title}: {unavailable}")
                if unavailable.for_good:
                    self._refused.add(factory.carrier)
            except errors.ShoalError as error:
                self._refused.add(factory.carrier)
                if self._refused.issuperset(other.carrier for other in self._factories):
                    self._refused.clear()  # none is left: the caller's next attempt tries all of them
                    raise
                # Not the error itself: its traceback would keep this call's memory alive.
                refused, why = factory.carrier, error.message
        self._refused.clear()
        why = f" ({'; '.join(missing)})" if missing else ""
        raise errors.Unreachable(f"{target.address} has no transport for this client{why}", address=target.address)


__all__ = ["Selector"]

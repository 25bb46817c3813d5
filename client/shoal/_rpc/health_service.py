"""The health service of a role."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

HEALTH = health.SERVICE_NAME
_Status = health_pb2.HealthCheckResponse


class Health:
    """The standard health service, with `Check` alone. Thread-safe.

    Anybody may call it, so it keeps nothing of a request. The protocol lets a server leave `Watch` out. The `Watch` of
    grpcio keeps every service name that was asked for, and has no limit of streams.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}  # by service; replaced as a whole

    def set(self, services: Sequence[str], *, ready: bool) -> None:
        """Sets the status of services."""
        self._statuses = self._statuses | dict.fromkeys(services, _Status.SERVING if ready else _Status.NOT_SERVING)

    def handlers(self) -> Mapping[str, Any]:
        """Returns the handlers of the service's methods."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._check, health_pb2.HealthCheckRequest.FromString, _Status.SerializeToString
            )
        }

    def _check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:
        status = self._statuses.get(request.service)
        if status is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return _Status()
        return _Status(status=status)


__all__ = ["HEALTH", "Health"]

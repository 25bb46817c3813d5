"""The coordinator's gRPC services: servicers that translate calls into events, and answers into messages.

The one package of the coordinator that imports grpc. It decides nothing. `process` alone imports it; it imports the
shell and `messages`.
"""

from shoal_coordinator.api.servicers import CoordinatorService, JobsService

__all__ = [
    "CoordinatorService",
    "JobsService",
]

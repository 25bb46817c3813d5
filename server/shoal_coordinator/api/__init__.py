"""The coordinator's gRPC services: servicers that translate calls into events, and results into messages.

This is the coordinator's only package that imports grpc, and it makes no decisions. Only `process` imports it; it
imports the shell and `messages`.
"""

from shoal_coordinator.api.servicers import CoordinatorService, JobsService

__all__ = [
    "CoordinatorService",
    "JobsService",
]

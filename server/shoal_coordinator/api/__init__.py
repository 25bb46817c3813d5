"""The coordinator's gRPC services: servicers that translate calls into events, and results into messages.

No other package of the coordinator imports grpc. This package makes no decisions. It imports the shell and `messages`,
and only `process` imports it.
"""

from shoal_coordinator.api.groups import GroupsService
from shoal_coordinator.api.servicers import CoordinatorService, JobsService
from shoal_coordinator.api.tokens import TokensService

__all__ = [
    "CoordinatorService",
    "GroupsService",
    "JobsService",
    "TokensService",
]

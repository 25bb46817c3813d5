"""Effects: the threads that carry them out, calls to servers, and the cut, commit and restore of checkpoints.

`EffectRunner` carries out effects in the order in which they were decided, and reports the outcome of each. The cluster
machine decides on effects and handles their outcomes. The shell and the packages above it may import this package; it
imports `job`, for the ledger of a checkpoint, and `messages`.
"""

from shoal_coordinator.effects.copy_effects import GrantFor, no_grant
from shoal_coordinator.effects.effect_runner import EffectReport, EffectRunner
from shoal_coordinator.effects.server_channels import MAX_CHANNELS, CredentialsFor, no_credentials
from shoal_coordinator.effects.storage_reads import StorageReads

__all__ = [
    "MAX_CHANNELS",
    "CredentialsFor",
    "EffectReport",
    "EffectRunner",
    "GrantFor",
    "StorageReads",
    "no_credentials",
    "no_grant",
]

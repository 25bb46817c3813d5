"""What performs effects: calls to servers, and a checkpoint's cut, files and restore.

`EffectRunner` takes effects in the order in which they were decided, and reports what became of each. The cluster
machine decides which effects to perform, and what follows from an outcome. The shell and what is above it may import
it; it imports `job`, for the ledger that a checkpoint keeps, and `messages`.
"""

from shoal_coordinator.effects.effect_runner import EffectRunner, Report

__all__ = [
    "EffectRunner",
    "Report",
]

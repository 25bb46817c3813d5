"""Optimizers, and schedules of their learning rates: what a job names, and servers then apply."""

from shoal.optim._optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    Optimizer,
    RMSProp,
    from_proto,
)
from shoal.optim._schedules import Constant, Cosine, Exponential, Schedule, Step

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "Exponential",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "Schedule",
    "Step",
    "from_proto",
]

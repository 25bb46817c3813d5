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
from shoal.optim._schedules import ConstantLR, CosineLR, ExponentialLR, Schedule, StepLR

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConstantLR",
    "CosineLR",
    "ExponentialLR",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "Schedule",
    "StepLR",
    "from_proto",
]

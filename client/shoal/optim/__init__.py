"""Optimizers and learning-rate schedules. A job names them, and the servers apply them."""

from shoal.optim._groups import VariableGroup, VariableSettings
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
from shoal.optim._plateau import PlateauState, ReduceOnPlateau
from shoal.optim._schedules import (
    ConstantLR,
    CosineLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    PiecewiseLR,
    Schedule,
    StepLR,
)
from shoal.optim._slots import Slot
from shoal.optim._state import OptimizerState, checked_state

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConstantLR",
    "CosineLR",
    "ExponentialLR",
    "LinearLR",
    "Momentum",
    "OneCycleLR",
    "Optimizer",
    "OptimizerState",
    "PiecewiseLR",
    "PlateauState",
    "RMSProp",
    "ReduceOnPlateau",
    "Schedule",
    "Slot",
    "StepLR",
    "VariableGroup",
    "VariableSettings",
    "checked_state",
    "from_proto",
]

"""Optimizers by Keras' names, with its arguments and defaults.

Where the equations of Keras and `shoal.optim` differ, each docstring says how.
"""

import math
from typing import Any

from shoal import optim
from shoal.errors import InvalidOptimizer
from shoal_distribute.keras.optimizers.base import Optimizer
from shoal_distribute.keras.optimizers.schedules import rate_of
from shoal_distribute.local_optimizers import GradientClipping


class SGD(Optimizer):
    """Gradient descent, with heavy-ball or Nesterov's momentum.

    The momentum adds up gradients, and the rate of an update multiplies their sum. In Keras, each gradient has the rate
    of its own update. The results are equal while the rate is constant.

    Args:
        learning_rate: a number or a schedule.
        momentum: in [0, 1).
        nesterov: whether to use Nesterov's momentum.
        weight_decay: factor of the variables that each update subtracts, times the rate; without momentum only.
        clipnorm: largest norm of each gradient; None means no limit. Servers do not apply it.
        clipvalue: largest absolute value of an element of a gradient; None means no limit. Servers do not apply it.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.

    Raises:
        InvalidOptimizer: an argument is out of range.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "SGD",
    ) -> None:
        if weight_decay and momentum:
            raise InvalidOptimizer(
                "SGD: weight_decay with momentum is not supported; use AdamW, or leave one of them out"
            )
        clipping = _clipping("SGD", clipnorm, clipvalue, global_clipnorm)
        shared: Any = {"weight_decay": weight_decay or 0.0, "clip_norm": global_clipnorm or 0.0}
        rate = rate_of(learning_rate)
        spec = optim.Momentum(rate, momentum, nesterov, **shared) if momentum else optim.SGD(rate, **shared)
        super().__init__(spec, name, clipping)


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba, ICLR 2015), with epsilon as in section 2 of the paper and in Keras.

    Args:
        learning_rate: a number or a schedule.
        beta_1: decay of the mean of the gradients.
        beta_2: decay of the mean of their squares.
        epsilon: what is added to the root of the uncorrected mean of the squares.
        amsgrad: must be False.
        weight_decay: factor of the variables that each update subtracts, times the rate: it makes this an `AdamW`.
        clipnorm: largest norm of each gradient; None means no limit. Servers do not apply it.
        clipvalue: largest absolute value of an element of a gradient; None means no limit. Servers do not apply it.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.

    Raises:
        InvalidOptimizer: an argument is out of range, or `amsgrad` is True.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "adam",
    ) -> None:
        if amsgrad:
            raise InvalidOptimizer(f"{type(self).__name__}(amsgrad=True) is not supported; leave it out")
        clipping = _clipping(type(self).__name__, clipnorm, clipvalue, global_clipnorm)
        kind = optim.AdamW if weight_decay else optim.Adam
        spec = kind(
            rate_of(learning_rate),
            beta_1,
            beta_2,
            epsilon,
            eps_uncorrected=True,
            weight_decay=weight_decay or 0.0,
            clip_norm=global_clipnorm or 0.0,
        )
        super().__init__(spec, name, clipping)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).

    Args:
        learning_rate: a number or a schedule.
        weight_decay: factor of the variables that each update subtracts, times the rate.
        beta_1: see `Adam`.
        beta_2: see `Adam`.
        epsilon: see `Adam`.
        amsgrad: must be False.
        clipnorm: see `SGD`.
        clipvalue: see `SGD`.
        global_clipnorm: see `Adam`.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "adamw",
    ) -> None:
        limits = clipnorm, clipvalue, global_clipnorm
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay, *limits, name=name)


class RMSprop(Optimizer):
    """Root mean square propagation.

    Args:
        learning_rate: a number or a schedule.
        rho: decay of the mean of the squares.
        momentum: in [0, 1).
        epsilon: what is added to the mean of the squares, under the root.
        centered: whether to divide by the standard deviation.
        weight_decay: must be None or 0: use `AdamW`.
        clipnorm: largest norm of each gradient; None means no limit. Servers do not apply it.
        clipvalue: largest absolute value of an element of a gradient; None means no limit. Servers do not apply it.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "rmsprop",
    ) -> None:
        _check_no_decay("RMSprop", weight_decay)
        clipping, clip_norm = _clipping("RMSprop", clipnorm, clipvalue, global_clipnorm), global_clipnorm or 0.0
        rate = rate_of(learning_rate)
        spec = optim.RMSProp(rate, rho, epsilon, momentum, centered, eps_under_root=True, clip_norm=clip_norm)
        super().__init__(spec, name, clipping)


class Adagrad(Optimizer):
    """Adaptive subgradients (Duchi et al., JMLR 12, 2011).

    Keras adds epsilon under the root; with an accumulator of 0.1 or more the difference is below 1e-6.

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value: first value of the sum of squares.
        epsilon: what is added to the root of the sum of squares.
        weight_decay: must be None or 0: use `AdamW`.
        clipnorm: largest norm of each gradient; None means no limit. Servers do not apply it.
        clipvalue: largest absolute value of an element of a gradient; None means no limit. Servers do not apply it.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "adagrad",
    ) -> None:
        _check_no_decay("Adagrad", weight_decay)
        clipping, clip_norm = _clipping("Adagrad", clipnorm, clipvalue, global_clipnorm), global_clipnorm or 0.0
        spec = optim.Adagrad(rate_of(learning_rate), initial_accumulator_value, epsilon, clip_norm=clip_norm)
        super().__init__(spec, name, clipping)


class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al., KDD 2013).

    Args:
        learning_rate: a number or a schedule.
        learning_rate_power: at most 0.
        initial_accumulator_value: first value of the sum of squares.
        l1_regularization_strength: L1 penalty.
        l2_regularization_strength: L2 penalty on the values.
        l2_shrinkage_regularization_strength: L2 penalty that does not enter the accumulator.
        beta: beta of the paper.
        weight_decay: factor of the variables that each update subtracts, times the rate.
        clipnorm: largest norm of each gradient; None means no limit. Servers do not apply it.
        clipvalue: largest absolute value of an element of a gradient; None means no limit. Servers do not apply it.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        *,
        name: str = "ftrl",
    ) -> None:
        clipping = _clipping("Ftrl", clipnorm, clipvalue, global_clipnorm)
        spec = optim.FTRL(
            rate_of(learning_rate),
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
            weight_decay=weight_decay or 0.0,
            clip_norm=global_clipnorm or 0.0,
        )
        super().__init__(spec, name, clipping)


def _clipping(
    owner: str, clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None
) -> GradientClipping | None:
    """Returns the limits of each gradient; None without any.

    Args:
        owner: name of the optimizer's class.
        clipnorm: see `SGD`.
        clipvalue: see `SGD`.
        global_clipnorm: see `SGD`.

    Raises:
        InvalidOptimizer: more than one limit is given, or one is not above 0.
    """
    given = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if len(limits) > 1:
        raise InvalidOptimizer(f"{owner}: {' and '.join(limits)} are given; give only one of them")
    for name, limit in limits.items():
        if not 0 < limit < math.inf:
            raise InvalidOptimizer(f"{owner}: {name} is {limit!r}; it must be above 0 and finite")
    return None if clipnorm is None and clipvalue is None else GradientClipping(clipnorm or 0.0, clipvalue or 0.0)


def _check_no_decay(owner: str, weight_decay: float | None) -> None:
    if weight_decay:
        raise InvalidOptimizer(f"{owner}(weight_decay={weight_decay}) is not supported; use AdamW, or leave it out")


__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "RMSprop"]

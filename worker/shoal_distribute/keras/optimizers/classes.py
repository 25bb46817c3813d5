"""Optimizers by Keras' names, with its arguments and defaults.

Where the equations of Keras and `shoal.optim` differ, each docstring says how.
"""

from typing import Any

from shoal import optim
from shoal.errors import InvalidOptimizer
from shoal_distribute.keras.optimizers.base import Optimizer
from shoal_distribute.keras.optimizers.schedules import rate_of


class SGD(Optimizer):
    """Gradient descent, with heavy-ball or Nesterov's momentum.

    The momentum adds up gradients, and the rate of an update multiplies their sum. In Keras, each gradient has the rate
    of its own update. The results are equal while the rate is constant.

    Args:
        learning_rate: a number or a schedule.
        momentum: in [0, 1).
        nesterov: whether to use Nesterov's momentum.
        weight_decay: factor of the variables that each update subtracts, times the rate; without momentum only.
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
        global_clipnorm: float | None = None,
        name: str = "SGD",
    ) -> None:
        if weight_decay and momentum:
            raise InvalidOptimizer(
                "SGD: weight_decay with momentum is not supported; use AdamW, or leave one of them out"
            )
        shared: Any = {"weight_decay": weight_decay or 0.0, "clip_norm": global_clipnorm or 0.0}
        rate = rate_of(learning_rate)
        spec = optim.Momentum(rate, momentum, nesterov, **shared) if momentum else optim.SGD(rate, **shared)
        super().__init__(spec, name)


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba, ICLR 2015), with epsilon as in section 2 of the paper and in Keras.

    Args:
        learning_rate: a number or a schedule.
        beta_1: decay of the mean of the gradients.
        beta_2: decay of the mean of their squares.
        epsilon: what is added to the root of the uncorrected mean of the squares.
        weight_decay: factor of the variables that each update subtracts, times the rate: it makes this an `AdamW`.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "adam",
    ) -> None:
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
        super().__init__(spec, name)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019).

    Args:
        learning_rate: a number or a schedule.
        weight_decay: factor of the variables that each update subtracts, times the rate.
        beta_1: see `Adam`.
        beta_2: see `Adam`.
        epsilon: see `Adam`.
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
        global_clipnorm: float | None = None,
        name: str = "adamw",
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, weight_decay, global_clipnorm, name)


class RMSprop(Optimizer):
    """Root mean square propagation.

    Args:
        learning_rate: a number or a schedule.
        rho: decay of the mean of the squares.
        momentum: in [0, 1).
        epsilon: what is added to the mean of the squares, under the root.
        centered: whether to divide by the standard deviation.
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
        global_clipnorm: float | None = None,
        name: str = "rmsprop",
    ) -> None:
        clip_norm = global_clipnorm or 0.0
        rate = rate_of(learning_rate)
        super().__init__(
            optim.RMSProp(rate, rho, epsilon, momentum, centered, eps_under_root=True, clip_norm=clip_norm), name
        )


class Adagrad(Optimizer):
    """Adaptive subgradients (Duchi et al., JMLR 12, 2011).

    Keras adds epsilon under the root; with an accumulator of 0.1 or more the difference is below 1e-6.

    Args:
        learning_rate: a number or a schedule.
        initial_accumulator_value: first value of the sum of squares.
        epsilon: what is added to the root of the sum of squares.
        global_clipnorm: largest norm of all gradients together; None means no limit.
        name: its name.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        global_clipnorm: float | None = None,
        name: str = "adagrad",
    ) -> None:
        clip_norm = global_clipnorm or 0.0
        super().__init__(
            optim.Adagrad(rate_of(learning_rate), initial_accumulator_value, epsilon, clip_norm=clip_norm), name
        )


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
        name: str = "ftrl",
    ) -> None:
        spec = optim.FTRL(
            rate_of(learning_rate),
            learning_rate_power,
            initial_accumulator_value,
            l1_regularization_strength,
            l2_regularization_strength,
            l2_shrinkage_regularization_strength,
            beta,
        )
        super().__init__(spec, name)


__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "RMSprop"]

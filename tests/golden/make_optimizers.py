"""Generator of optimizers.json: results of 100 updates by PyTorch and Keras in float64, for `test_update_rules.py`.

    pip install torch==2.13.0 keras==3.15.1 numpy && python tests/golden/make_optimizers.py

Two variables are trained: "kernel" (4 values) and "bias" (2), in this order in the arena. Initial values and gradients
are multiples of 1/256, which float32 and JSON hold exactly. Each case names a class of `shoal.optim` and its arguments,
and holds the reference's values after 1, 2, 10, 50 and 100 updates.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch.optim import lr_scheduler as schedulers

STEPS = 100
KEPT = (1, 2, 10, 50, 100)  # numbers of updates after which the values are written down
SIZES = {"kernel": 4, "bias": 2}

Values = list[float]
Case = dict[str, Any]


def main() -> None:
    """Writes the file beside this script."""
    chance = random.Random(20)
    count = sum(SIZES.values())
    initial = [chance.randrange(-512, 512) / 256 for _ in range(count)]
    # A drift keeps the values moving, and some elements have no gradient in some steps.
    drift = [chance.randrange(-128, 128) for _ in range(count)]
    gradients = [
        [0.0 if chance.random() < 0.1 else (chance.randrange(-256, 257) + drift[i]) / 256 for i in range(count)]
        for _ in range(STEPS)
    ]
    cases = [case | {"values": run(initial, gradients)} for case, run in (*torch_cases(), *keras_cases())]
    golden = {"kept": KEPT, "sizes": SIZES, "initial": initial, "gradients": gradients, "cases": cases}
    rows = ",\n".join(f'"{key}": {in_rows(value)}' for key, value in golden.items())
    Path(__file__).with_name("optimizers.json").write_text(f"{{\n{rows}\n}}\n")


def in_rows(value: Any) -> str:
    """JSON with a line for each gradient and each case."""
    nested = isinstance(value, list) and not isinstance(value[0], float)
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if nested else json.dumps(value)


def torch_cases() -> Iterator[tuple[Case, Callable[[Values, list[Values]], list[Values]]]]:
    """Cases with a PyTorch optimizer: (name, our class and numbers, PyTorch's class and numbers, its scheduler)."""
    optim = torch.optim
    table: list[tuple[str, str, Case, Any, Case]] = [
        ("sgd", "SGD", {"learning_rate": 0.1}, optim.SGD, {"lr": 0.1}),
        (
            "sgd-decay",
            "SGD",
            {"learning_rate": 0.1, "weight_decay": 0.01},
            optim.SGD,
            {"lr": 0.1, "weight_decay": 0.01},
        ),
        ("momentum", "Momentum", {"learning_rate": 0.05}, optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (
            "nesterov-decay",
            "Momentum",
            {"learning_rate": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
            optim.SGD,
            {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
        ),
        ("adagrad", "Adagrad", {}, optim.Adagrad, {}),
        (
            "adagrad-decay",
            "Adagrad",
            {"learning_rate": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6, "weight_decay": 0.01},
            optim.Adagrad,
            {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6, "weight_decay": 0.01},
        ),
        ("rmsprop", "RMSProp", {}, optim.RMSprop, {}),
        ("rmsprop-momentum", "RMSProp", {"momentum": 0.9}, optim.RMSprop, {"momentum": 0.9}),
        ("rmsprop-centered", "RMSProp", {"centered": True}, optim.RMSprop, {"centered": True}),
        (
            "rmsprop-all",
            "RMSProp",
            {"learning_rate": 0.02, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "centered": True, "weight_decay": 0.01},
            optim.RMSprop,
            {"lr": 0.02, "alpha": 0.9, "eps": 1e-4, "momentum": 0.5, "centered": True, "weight_decay": 0.01},
        ),
        ("adam", "Adam", {}, optim.Adam, {}),
        (
            "adam-decay",
            "Adam",
            {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.05},
            optim.Adam,
            {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05},
        ),
        ("adamw", "AdamW", {}, optim.AdamW, {}),
        (
            "adamw-decay",
            "AdamW",
            {"learning_rate": 0.02, "weight_decay": 0.1},
            optim.AdamW,
            {"lr": 0.02, "weight_decay": 0.1},
        ),
    ]
    for name, ours, numbers, reference, theirs in table:
        yield {"name": name, "optimizer": ours, "numbers": numbers}, torch_run(reference, theirs)
    for name, ours, reference, decay in (
        ("sgd-exclude", "SGD", optim.SGD, 0.05),
        ("adamw-exclude", "AdamW", optim.AdamW, 0.3),
    ):
        numbers = {"learning_rate": 0.05, "weight_decay": decay, "decay_exclude": ["*bias"]}
        case = {"name": name, "optimizer": ours, "numbers": numbers}
        yield case, torch_run(reference, {"lr": 0.05, "weight_decay": decay}, exclude="bias")
    for name, ours, reference in (
        ("sgd-groups", "SGD", optim.SGD),
        ("adagrad-groups", "Adagrad", optim.Adagrad),
        ("adam-groups", "Adam", optim.Adam),
        ("adamw-groups", "AdamW", optim.AdamW),
        ("rmsprop-groups", "RMSProp", optim.RMSprop),
    ):
        groups: Case = {"kernel": {"rate": 0.25}, "bias": {"rate": 2.0, "weight_decay": 0.02}}
        numbers = {"learning_rate": 0.02, "weight_decay": 0.1}
        case = {"name": name, "optimizer": ours, "numbers": numbers | {"groups": in_groups(groups)}}
        yield case, torch_run(reference, {"lr": 0.02, "weight_decay": 0.1}, groups=groups)
    groups = {"kernel": {"rate": 2.0}, "bias": {"frozen": True}}
    numbers = {"learning_rate": 0.01, "groups": in_groups(groups)}
    yield (
        {"name": "adam-frozen", "optimizer": "Adam", "numbers": numbers},
        torch_run(optim.Adam, {"lr": 0.01}, groups=groups),
    )
    for name, schedule, warmup, scheduler in (
        ("adam-step", {"name": "StepLR", "step_size": 30, "gamma": 0.5}, 0, lambda o: schedulers.StepLR(o, 30, 0.5)),
        (
            "adam-exponential-warm",
            {"name": "ExponentialLR", "gamma": 0.98},
            12,
            lambda o: schedulers.ExponentialLR(o, 0.98),
        ),
        (
            "adam-cosine-warm",
            {"name": "CosineLR", "steps": 90, "minimum": 0.001},
            10,
            lambda o: schedulers.CosineAnnealingLR(o, 90, 0.001),
        ),
        ("adam-constant-warm", {"name": "ConstantLR"}, 20, lambda o: schedulers.ConstantLR(o, 1.0)),
        (
            "adam-linear",
            {"name": "LinearLR", "steps": 80, "final": 0.003},
            0,
            lambda o: schedulers.LinearLR(o, 1.0, 0.1, total_iters=80),
        ),
        (
            "adam-piecewise",
            {"name": "PiecewiseLR", "boundaries": [20, 60], "rates": [0.015, 0.003]},
            0,
            lambda o: schedulers.LambdaLR(o, lambda v: 1.0 if v < 20 else 0.5 if v < 60 else 0.1),
        ),
        (
            "adam-onecycle",
            {"name": "OneCycleLR", "steps": 100},
            0,
            lambda o: schedulers.OneCycleLR(o, 0.03, total_steps=100, cycle_momentum=False),
        ),
        (
            "adam-onecycle-linear",
            {"name": "OneCycleLR", "steps": 100, "rise": 0.4, "div_factor": 10, "final_div_factor": 20, "linear": True},
            0,
            lambda o: schedulers.OneCycleLR(
                o, 0.03, None, 10, 10, 0.4, "linear", cycle_momentum=False, div_factor=10, final_div_factor=20
            ),
        ),
    ):
        rate = schedule | {"learning_rate": 0.03, "warmup_steps": warmup}
        case = {"name": name, "optimizer": "Adam", "numbers": {"learning_rate": rate}}
        yield case, torch_run(optim.Adam, {"lr": 0.03}, scheduler=after_warmup(warmup, scheduler))


def in_groups(groups: Case) -> list[Case]:
    """Returns the arguments of our groups; the pattern is the name of a variable."""
    return [{"pattern": name} | settings for name, settings in groups.items()]


def after_warmup(warmup: int, scheduler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A scheduler behind a linear warm-up whose update v, from 0, has the rate (v + 1) / warmup."""

    def build(optimizer: Any) -> Any:
        if not warmup:
            return scheduler(optimizer)
        rise = schedulers.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        return schedulers.SequentialLR(optimizer, [rise, scheduler(optimizer)], milestones=[warmup])

    return build


def torch_run(
    reference: Any,
    numbers: Case,
    *,
    exclude: str = "",
    groups: Case | None = None,
    scheduler: Callable[[Any], Any] | None = None,
) -> Callable[[Values, list[Values]], list[Values]]:
    """Trains with a PyTorch optimizer, one parameter group a variable; `exclude` has no weight decay."""
    ours = groups or {}

    def theirs(name: str) -> Case:
        """Returns the settings of a variable's parameter group."""
        settings = dict(ours.get(name, {}))
        settings.pop("frozen", False)
        rate = settings.pop("rate", None)
        return (
            settings
            | ({"weight_decay": 0.0} if name == exclude else {})
            | ({"lr": rate * numbers["lr"]} if rate else {})
        )

    def run(initial: Values, gradients: list[Values]) -> list[Values]:
        parts = torch.tensor(initial, dtype=torch.float64).split(list(SIZES.values()))
        named = dict(zip(SIZES, (part.clone().requires_grad_() for part in parts), strict=True))
        optimizer = reference([{"params": [x]} | theirs(name) for name, x in named.items()], **numbers)
        schedule = scheduler(optimizer) if scheduler else None
        kept = []
        for number, gradient in enumerate(gradients, start=1):
            slopes = torch.tensor(gradient, dtype=torch.float64).split(list(SIZES.values()))
            for (name, x), slope in zip(named.items(), slopes, strict=True):
                x.grad = None if ours.get(name, {}).get("frozen") else slope
            optimizer.step()
            if schedule:
                schedule.step()
            if number in KEPT:
                kept.append(torch.cat([x.detach() for x in named.values()]).tolist())
        return kept

    return run


def keras_cases() -> Iterator[tuple[Case, Callable[[Values, list[Values]], list[Values]]]]:
    """Cases with Keras's optimizers: those whose equations differ from PyTorch's."""
    tiny = {"learning_rate": 0.03, "eps": 0.01}  # so large that its place matters
    for name, optimizer, theirs, flags, numbers in (
        ("adam-uncorrected", "Adam", keras.optimizers.Adam, {"eps_uncorrected": True}, {}),
        ("rmsprop-root", "RMSProp", keras.optimizers.RMSprop, {"eps_under_root": True}, {"momentum": 0.5}),
        ("rmsprop-root-centered", "RMSProp", keras.optimizers.RMSprop, {"eps_under_root": True}, {"centered": True}),
    ):
        spread = {"alpha": 0.9} if optimizer == "RMSProp" else {}
        case = {"name": name, "optimizer": optimizer, "numbers": tiny | spread | flags | numbers}
        yield case, keras_run(theirs, {"learning_rate": 0.03, "epsilon": 0.01} | numbers)
    longer = {
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
        "l2_shrinkage": "l2_shrinkage_regularization_strength",
    }
    for name, numbers in (
        ("ftrl", {"learning_rate": 0.1}),
        ("ftrl-l1", {"learning_rate": 0.1, "l1": 3.0, "initial_accumulator_value": 1.0}),
        (
            "ftrl-all",
            {"learning_rate": 0.2, "l1": 0.5, "l2": 0.3, "l2_shrinkage": 0.02, "beta": 0.7, "weight_decay": 0.1},
        ),
        ("ftrl-power", {"learning_rate": 0.1, "learning_rate_power": -0.7, "l2": 0.1}),
    ):
        theirs = {longer.get(key, key): value for key, value in numbers.items()}
        yield {"name": name, "optimizer": "FTRL", "numbers": numbers}, keras_run(keras.optimizers.Ftrl, theirs)


def keras_run(reference: Any, numbers: Case) -> Callable[[Values, list[Values]], list[Values]]:
    """Trains with an optimizer of Keras on PyTorch."""

    def run(initial: Values, gradients: list[Values]) -> list[Values]:
        keras.config.set_floatx("float64")
        x = keras.Variable(initial, dtype="float64")
        optimizer = reference(**numbers)
        kept = []
        for number, gradient in enumerate(gradients, start=1):
            optimizer.apply([torch.tensor(gradient, dtype=torch.float64)], [x])
            if number in KEPT:
                kept.append(keras.ops.convert_to_numpy(x).tolist())
        return kept

    return run


if __name__ == "__main__":
    main()

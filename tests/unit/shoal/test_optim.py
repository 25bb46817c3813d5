"""Specifications of optimizers and schedules: rates, their form on the wire, and the values that they refuse."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import optim
from shoal.errors import InvalidOptimizer
from shoal.optim import _text as optim_text
from shoal.v1 import job_pb2

UNTYPED: Any = optim  # what a caller without a type checker may pass
FRACTIONS = st.floats(0, 1, exclude_max=True)
FACTORS = st.floats(0, 1, exclude_min=True)
SIZES = st.floats(0, 1e6)
EPSILONS = st.floats(1e-30, 1)
COUNTS = st.integers(1, 2**53)
WARMUPS = st.integers(0, 2**53)
SCHEDULES = st.one_of(
    st.builds(optim.ConstantLR, SIZES, warmup_steps=WARMUPS),
    st.builds(optim.StepLR, SIZES, COUNTS, FACTORS, warmup_steps=WARMUPS),
    st.builds(optim.ExponentialLR, SIZES, FACTORS, warmup_steps=WARMUPS),
    st.builds(optim.CosineLR, SIZES.map(lambda x: x + 1), COUNTS, FRACTIONS, warmup_steps=WARMUPS),
)
OTHER_SCHEDULES = st.one_of(
    st.builds(optim.LinearLR, SIZES, COUNTS, SIZES, warmup_steps=WARMUPS),
    st.builds(optim.OneCycleLR, SIZES, COUNTS, FRACTIONS, st.floats(1, 1e6), st.floats(1, 1e6), st.booleans()),
    st.sets(COUNTS, min_size=1, max_size=5).flatmap(
        lambda at: st.builds(
            optim.PiecewiseLR,
            SIZES,
            st.just(tuple(sorted(at))),
            st.lists(SIZES, min_size=len(at), max_size=len(at)).map(tuple),
            st.booleans(),
        )
    ),
)
COMMON: dict[str, Any] = {
    "learning_rate": SIZES | SCHEDULES | OTHER_SCHEDULES,
    "weight_decay": SIZES,
    "clip_norm": SIZES,
    "decay_exclude": st.lists(st.text(max_size=5).filter(str.isprintable), max_size=3).map(tuple),
    "groups": st.lists(
        st.builds(
            optim.VariableGroup, st.text(min_size=1, max_size=5).filter(str.isprintable), SIZES, st.none() | SIZES
        ),
        max_size=3,
    ),
}
OPTIMIZERS = st.one_of(
    st.builds(optim.SGD, **COMMON),
    st.builds(optim.Momentum, momentum=st.floats(0.1, 0.99), nesterov=st.booleans(), **COMMON),
    st.builds(optim.Adagrad, initial_accumulator_value=SIZES, eps=EPSILONS, **COMMON),
    st.builds(
        optim.RMSProp,
        alpha=FRACTIONS,
        eps=EPSILONS,
        momentum=FRACTIONS,
        centered=st.booleans(),
        eps_under_root=st.booleans(),
        **COMMON,
    ),
    st.builds(optim.Adam, beta1=FRACTIONS, beta2=FRACTIONS, eps=EPSILONS, **COMMON),
    st.builds(optim.AdamW, beta1=FRACTIONS, beta2=FRACTIONS, eps=EPSILONS, **COMMON),
    st.builds(optim.FTRL, learning_rate_power=FRACTIONS.map(lambda x: -x), l1=SIZES, l2=SIZES, beta=SIZES, **COMMON),
)


@given(optimizer=OPTIMIZERS)
def test_over_the_wire_and_back(optimizer: optim.Optimizer) -> None:
    message = job_pb2.Optimizer.FromString(optimizer.to_proto().SerializeToString())
    back = optim.from_proto(message)
    assert back == optimizer
    assert type(back) is type(optimizer)
    assert repr(back) == repr(optimizer)  # so flags are bool again, and counts int
    assert back.to_proto() == optimizer.to_proto()


def test_the_message_holds_each_number_once() -> None:
    message = optim.AdamW(optim.StepLR(0.5, 10, warmup_steps=3), decay_exclude=("*bias",)).to_proto()
    assert message.name == "adamw"
    assert dict(message.hyperparameters) == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    assert optim.Adam(eps_uncorrected=True).to_proto().hyperparameters["eps_uncorrected"] == 1
    assert message.weight_decay == 0.01
    assert list(message.decay_exclude) == ["*bias"]
    assert message.learning_rate.name == "step"
    assert dict(message.learning_rate.parameters) == {"learning_rate": 0.5, "step_size": 10, "gamma": 0.1}
    assert message.learning_rate.warmup_steps == 3


def test_names_on_the_wire_are_those_of_the_contract() -> None:
    assert sorted(optim.Optimizer.registry) == ["adagrad", "adam", "adamw", "ftrl", "momentum", "rmsprop", "sgd"]
    assert sorted(optim.Schedule.registry) == [
        "constant",
        "cosine",
        "exponential",
        "linear",
        "onecycle",
        "piecewise",
        "step",
    ]
    for name, known in {**optim.Optimizer.registry, **optim.Schedule.registry}.items():
        assert known.name == name
        assert known.__name__ in optim.__all__


def test_missing_field_of_a_message_takes_its_default() -> None:
    assert optim.from_proto(job_pb2.Optimizer(name="adam")) == optim.Adam()
    assert optim.from_proto(job_pb2.Optimizer(name="adamw")) == optim.AdamW(weight_decay=0.0)  # 0 is a value


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"name": "adma"},
            "unknown optimizer 'adma'; choose one of adagrad, adam, adamw, ftrl, momentum, rmsprop, sgd",
        ),
        ({}, "unknown optimizer ''"),
        ({"name": "adam", "hyperparameters": {"beta3": 1}}, "adam: unknown beta3; it takes beta1, beta2, eps"),
        ({"name": "sgd", "hyperparameters": {"weight_decay": 1}}, "sgd: unknown weight_decay; it takes no numbers"),
        ({"name": "adam", "hyperparameters": {"beta1": 1}}, "adam: beta1 is 1.0; it must be finite and at least 0 and"),
        ({"name": "momentum", "hyperparameters": {"nesterov": 0.5}}, "momentum: nesterov is 0.5"),
        ({"name": "sgd", "weight_decay": math.inf}, "sgd: weight_decay is inf"),
        (
            {"name": "sgd", "learning_rate": {"name": "triangle"}},
            "unknown schedule 'triangle'; choose one of constant, cosine",
        ),
        ({"name": "sgd", "learning_rate": {"name": "constant"}}, "constant: learning_rate is missing"),
        (
            {"name": "sgd", "learning_rate": {"name": "step", "parameters": {"learning_rate": 1}}},
            "step: step_size is missing",
        ),
        (
            {"name": "sgd", "learning_rate": {"name": "constant", "parameters": {"learning_rate": 1, "gamma": 1}}},
            "constant: unknown gamma; it takes learning_rate",
        ),
        (
            {
                "name": "sgd",
                "learning_rate": {"name": "constant", "parameters": {"learning_rate": 1}, "boundaries": [1]},
            },
            "constant: it takes no boundaries",
        ),
        (
            {"name": "sgd", "learning_rate": {"name": "piecewise", "parameters": {"learning_rate": 1}}},
            "piecewise: there are 0 boundaries and 0 rates",
        ),
    ],
)
def test_messages_that_are_not_ours_are_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOptimizer) as caught:
        optim.from_proto(job_pb2.Optimizer(**message))
    assert caught.value.message.startswith(says)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: UNTYPED.SGD(-0.1), "sgd: learning_rate is -0.1; it must be finite and at least 0"),
        (lambda: UNTYPED.SGD(math.nan), "sgd: learning_rate is nan"),
        (lambda: UNTYPED.Adam(math.inf), "adam: learning_rate is inf"),
        (lambda: UNTYPED.SGD(10**400), "sgd: learning_rate is 1000"),
        (lambda: UNTYPED.Adam("fast"), "adam: learning_rate is 'fast'"),
        (lambda: UNTYPED.Adam(None), "adam: learning_rate is None"),
        (lambda: UNTYPED.Adam(beta1=1.0), "adam: beta1 is 1.0"),
        (lambda: UNTYPED.AdamW(beta2=-0.1), "adamw: beta2 is -0.1"),
        (lambda: UNTYPED.Adam(eps=0), "adam: eps is 0"),
        (lambda: UNTYPED.Adagrad(eps=1e-40), "adagrad: eps is 1e-40"),
        (lambda: UNTYPED.Adagrad(initial_accumulator_value=-1), "adagrad: initial_accumulator_value is -1"),
        (lambda: UNTYPED.RMSProp(alpha=math.nan), "rmsprop: alpha is nan"),
        (lambda: UNTYPED.RMSProp(centered=2), "rmsprop: centered is 2"),
        (lambda: UNTYPED.Momentum(momentum=1), "momentum: momentum is 1"),
        (lambda: UNTYPED.Momentum(momentum=0, nesterov=True), "momentum: nesterov needs a momentum above 0"),
        (lambda: UNTYPED.FTRL(learning_rate_power=0.5), "ftrl: learning_rate_power is 0.5"),
        (lambda: UNTYPED.FTRL(initial_accumulator_value=0), "ftrl: initial_accumulator_value is 0"),
        (lambda: UNTYPED.FTRL(l1=-1), "ftrl: l1 is -1"),
        (lambda: UNTYPED.SGD(weight_decay=-1), "sgd: weight_decay is -1"),
        (lambda: UNTYPED.SGD(weight_decay=math.nan), "sgd: weight_decay is nan"),
        (lambda: UNTYPED.SGD(decay_exclude="*bias"), "sgd: decay_exclude is '*bias'; give a tuple"),
        (lambda: UNTYPED.SGD(decay_exclude=(1,)), "sgd: decay_exclude is (1,)"),
        (lambda: UNTYPED.SGD(clip_norm=math.nan), "sgd: clip_norm is nan; it must be finite and at least 0"),
        (lambda: UNTYPED.SGD(groups="*bias"), "sgd: groups has '*bias'; give a list of shoal.optim.VariableGroup"),
        (lambda: UNTYPED.SGD(groups={"*bias": {}}), "sgd: groups has '*bias'"),
        (lambda: UNTYPED.VariableGroup("*", math.nan), "group '*': rate is nan; it must be finite and at least 0"),
        (lambda: UNTYPED.VariableGroup("*", weight_decay=-1), "group '*': weight_decay is -1"),
        (lambda: UNTYPED.VariableGroup("*", True), "group '*': rate is True; it must be finite and at least 0"),
        (
            lambda: UNTYPED.VariableGroup("*", frozen=[1]),
            "group '*': frozen is [1]; it must be finite and true or false",
        ),
        (lambda: UNTYPED.SGD(True), "sgd: learning_rate is True"),
        (lambda: UNTYPED.VariableGroup(""), "the pattern of a group is ''"),
        (lambda: UNTYPED.VariableGroup("*", 0.5, frozen=True), "group '*' is frozen, but has rate 0.5"),
        (lambda: UNTYPED.StepLR(1.0, 0), "step: step_size is 0"),
        (lambda: UNTYPED.StepLR(1.0, 2.5), "step: step_size is 2.5"),
        (lambda: UNTYPED.StepLR(1.0, 10, gamma=1.5), "step: gamma is 1.5"),
        (lambda: UNTYPED.ExponentialLR(1.0, 0.0), "exponential: gamma is 0.0"),
        (lambda: UNTYPED.CosineLR(1.0, 10, minimum=2.0), "cosine: minimum 2.0 is above learning_rate 1.0"),
        (lambda: UNTYPED.ConstantLR(1.0, warmup_steps=-1), "constant: warmup_steps is -1"),
        (lambda: UNTYPED.LinearLR(1.0, 10, math.nan), "linear: final is nan"),
        (lambda: UNTYPED.OneCycleLR(1.0, 10, div_factor=0.5), "onecycle: div_factor is 0.5; it must be finite and at"),
        (lambda: UNTYPED.PiecewiseLR(1.0, 5, 0.1), "piecewise: boundaries is 5; give a tuple"),
        (lambda: UNTYPED.PiecewiseLR(1.0, (5,), (0.1, 0.2)), "piecewise: there are 1 boundaries and 2 rates"),
        (lambda: UNTYPED.PiecewiseLR(1.0, (5, 5), (1, 1)), "piecewise: boundaries are (5, 5); give versions in asc"),
        (lambda: UNTYPED.PiecewiseLR(1.0, (0,), (1,)), "a number of piecewise: boundaries is 0; it must be finite and"),
        (lambda: UNTYPED.PiecewiseLR(1.0, (5,), (math.nan,)), "a number of piecewise: rates is nan"),
        (lambda: UNTYPED.PiecewiseLR(1.0, range(1, 1002), [0] * 1001), "piecewise: there are 1001 boundaries"),
        (lambda: UNTYPED.SGD(lr=math.nan), "sgd: learning_rate is nan"),
        (lambda: UNTYPED.SGD(0.1, lr=0.2), "sgd: learning_rate and lr are both given, and lr sets learning_rate"),
        (lambda: UNTYPED.Adam(learning_rate=0.1, lr=0.1), "adam: learning_rate and lr are both given"),
        (lambda: UNTYPED.Adam(1e-3, lr=0.1), "adam: learning_rate and lr are both given"),
        (lambda: UNTYPED.Adam(betas=(0.9, 0.99), beta2=0.9), "adam: beta2 and betas are both given"),
        (lambda: UNTYPED.AdamW(0.1, 0.9, betas=(0.9, 0.99)), "adamw: beta1 and betas are both given"),
        (lambda: UNTYPED.Adam(betas=(0.9,)), "adam: betas is (0.9,); give two numbers"),
        (lambda: UNTYPED.Adam(betas=(0.9, 1)), "a number of adam: betas is 1"),
    ],
)
def test_numbers_out_of_range_are_refused(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidOptimizer) as caught:
        build()
    assert caught.value.message.startswith(says)


def test_specifications_are_frozen_and_comparable() -> None:
    optimizer = optim.Adam(np.float32(0.5), decay_exclude=["*bias"])  # type: ignore[arg-type]
    assert optimizer == optim.Adam(optim.ConstantLR(0.5), decay_exclude=("*bias",))
    assert hash(optimizer) == hash(optim.Adam(0.5, decay_exclude=("*bias",)))
    assert type(optimizer.learning_rate) is float
    assert optimizer != optim.AdamW(0.5, decay_exclude=("*bias",), weight_decay=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.beta1 = 0.5  # type: ignore[misc]


def test_other_names_of_arguments_set_the_same_fields() -> None:
    assert optim.SGD(lr=0.5) == optim.SGD(0.5)
    assert optim.AdamW(lr=optim.LinearLR(0.1, 9), betas=(0.8, 0.95)) == optim.AdamW(optim.LinearLR(0.1, 9), 0.8, 0.95)
    assert dataclasses.replace(optim.Adam(lr=0.5, betas=(0.8, 0.95)), eps=1e-3) == optim.Adam(0.5, 0.8, 0.95, 1e-3)
    assert optim.Momentum(lr=0.5, nesterov=True) == optim.Momentum(0.5, nesterov=True)


def test_patterns_match_with_case() -> None:
    optimizer = optim.SGD(weight_decay=0.5, decay_exclude=("*bias", "norm[0-9]/*"))
    names = ("dense/kernel", "dense/bias", "dense/Bias", "norm1/scale", "normal/scale", "bias_of")
    assert [optimizer.settings_of(name).weight_decay for name in names] == [0.5, 0, 0.5, 0, 0.5, 0.5]


def test_the_first_group_that_matches_counts() -> None:
    groups = [
        optim.VariableGroup("head/*", 10),
        optim.VariableGroup("*bias", weight_decay=0.25),
        optim.VariableGroup("b*", frozen=True),
    ]
    optimizer = optim.SGD(weight_decay=0.5, decay_exclude=("*bias",), groups=groups)
    found = {name: optimizer.settings_of(name) for name in ("head/w", "head/bias", "w/bias", "body/w", "w")}
    assert {name: (it.rate, it.weight_decay) for name, it in found.items()} == {
        "head/w": (10, 0.5),
        "head/bias": (10, 0),
        "w/bias": (1, 0.25),
        "body/w": (0, 0.5),
        "w": (1, 0.5),
    }


def test_a_pattern_that_matches_nothing_is_told_with_the_names() -> None:
    optimizer = optim.SGD(groups=[optim.VariableGroup("*bios", 2), optim.VariableGroup("w*", 2)])
    assert optimizer.unmatched(["w", "bias"]) == (
        "the optimizer has a group for '*bios', which matches no trainable variable; correct the pattern, or leave the "
        "group out. The trainable variables are 'w', 'bias'"
    )
    assert optimizer.unmatched(f"bios{i}" for i in range(30)).endswith("'bios19' and 10 more")
    assert optimizer.unmatched(["w", "bios"]) == ""


def rates(schedule: optim.Schedule, *versions: int) -> list[float]:
    return [schedule.rate(version) for version in versions]


def test_rates() -> None:
    assert rates(optim.ConstantLR(0.5), 0, 10**9) == [0.5, 0.5]
    assert rates(optim.StepLR(1.0, 10, 0.5), 0, 9, 10, 19, 20) == [1, 1, 0.5, 0.5, 0.25]
    assert rates(optim.ExponentialLR(8.0, 0.5), 0, 1, 3, 10**6) == [8, 4, 1, 0]
    cosine = optim.CosineLR(3.0, 100, minimum=1.0)
    assert rates(cosine, 0, 50, 100, 101, 10**9) == pytest.approx([3, 2, 1, 1, 1], rel=1e-15)


def test_rates_that_change_linearly_or_in_pieces() -> None:
    linear = optim.LinearLR(1.0, 4, 3.0, warmup_steps=2)
    assert rates(linear, 0, 1, 2, 3, 6, 10**9) == [0.5, 1, 1, 1.5, 3, 3]
    assert rates(optim.LinearLR(1.0, 10), 9, 10) == pytest.approx([0.1, 0])
    pieces = optim.PiecewiseLR(1.0, (2, 6), (0.5, 2.5))
    assert rates(pieces, 0, 1, 2, 5, 6, 10**9) == [1, 1, 0.5, 0.5, 2.5, 2.5]
    joined = optim.PiecewiseLR(1.0, (2, 6), (0.5, 2.5), interpolate=True)
    assert rates(joined, 0, 1, 2, 3, 6, 10**9) == [1, 0.75, 0.5, 1, 2.5, 2.5]


def test_one_cycle_rises_and_falls() -> None:
    cycle = optim.OneCycleLR(1.0, 100, 0.5, 10, 100)
    assert rates(cycle, 0, 49, 99, 100, 10**9) == pytest.approx([0.1, 1, 0.001, 0.001, 0.001], rel=1e-12)
    straight = optim.OneCycleLR(1.0, 101, 0.0, linear=True)
    assert rates(straight, 0, 100) == pytest.approx([1 - (1 - 4e-6) / 101, 4e-6], rel=1e-12)
    assert rates(optim.OneCycleLR(1.0, 1), 0, 1) == pytest.approx([4e-6, 4e-6])


@given(schedule=OTHER_SCHEDULES, version=st.integers(0, 2**60))
def test_a_rate_is_between_those_that_its_schedule_names(schedule: optim.Schedule, version: int) -> None:
    named = [schedule.learning_rate, *getattr(schedule, "rates", ()), getattr(schedule, "final", 0.0)]
    assert 0 <= schedule.rate(version) <= max(named) * (1 + 1e-12)


def test_warm_up_rises_to_the_rate_and_then_the_schedule_starts() -> None:
    warm = optim.StepLR(1.0, 2, 0.5, warmup_steps=4)
    assert rates(warm, *range(9)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert rates(optim.ConstantLR(2.0, warmup_steps=1), 0, 1) == [2.0, 2.0]
    assert optim.SGD(warm).rate(1) == 0.5


@given(schedule=SCHEDULES, version=st.integers(0, 2**60))
def test_a_rate_is_finite_and_never_above_where_it_starts(schedule: optim.Schedule, version: int) -> None:
    rate = schedule.rate(version)
    assert math.isfinite(rate)
    assert 0 <= rate <= schedule.learning_rate * (1 + 1e-15)


def torch_reductions(spec: optim.ReduceOnPlateau, values: list[float], mode: str) -> list[int]:
    """PyTorch's ReduceLROnPlateau: the numbers of the values at which it reduces the rate."""
    best, bad, cooldown, found = math.inf if mode == "min" else -math.inf, 0, 0, []
    for number, value in enumerate(values):
        bar = {
            ("min", True): best * (1 - spec.threshold),
            ("min", False): best - spec.threshold,
            ("max", True): best * (1 + spec.threshold),
            ("max", False): best + spec.threshold,
        }[mode, spec.relative]
        better = value < bar if mode == "min" else value > bar
        best, bad = (value, 0) if better else (best, bad + 1)
        if cooldown > 0:
            cooldown, bad = cooldown - 1, 0
        if bad > spec.patience:
            cooldown, bad = spec.cooldown, 0
            found.append(number)
    return found


@given(
    st.builds(
        optim.ReduceOnPlateau,
        patience=st.integers(0, 3),
        threshold=st.sampled_from([0.0, 1e-4, 0.25]),
        relative=st.booleans(),
        cooldown=st.integers(0, 3),
    ),
    st.lists(st.sampled_from([0.25, 0.5, 0.50001, 1.0, 1.25, 2.0, math.nan]), max_size=30),
    st.sampled_from(["min", "max"]),
)
def test_plateaus_are_those_of_torch(spec: optim.ReduceOnPlateau, values: list[float], mode: str) -> None:
    state, found = optim.PlateauState(), []
    for number, value in enumerate(values):
        state, reduces = spec.after(state, value, minimizes=mode == "min")
        assert optim.PlateauState.from_proto(state.to_proto()) == state
        found += [number] if reduces else []
    assert found == torch_reductions(spec, values, mode)
    assert optim.ReduceOnPlateau.from_proto(spec.to_proto()) == spec


def test_a_reduced_rate_is_never_below_the_minimum_nor_above_the_rate() -> None:
    spec = optim.ReduceOnPlateau(0.5, minimum=0.1)
    assert [spec.reduced(rate) for rate in (1.0, 0.15, 0.1, 0.05, 0.1 + 1e-9)] == [0.5, 0.1, 0.1, 0.05, 0.1 + 1e-9]


def test_the_text_form_of_a_plateau() -> None:
    given = optim_text.parse_plateau("factor=0.5,patience=3,relative=false")
    assert given == optim.ReduceOnPlateau(0.5, patience=3, relative=False)
    for text, says in {
        "gamma=2": "gamma=2: unknown gamma; the reduction takes factor, patience, threshold",
        "factor=1": "reduce_on_plateau: factor is 1; it must be finite and at least 0 and below 1",
        "patience=-1": "reduce_on_plateau: patience is -1",
    }.items():
        with pytest.raises(InvalidOptimizer, match=says):
            optim_text.parse_plateau(text)


def test_users_need_no_compiler() -> None:
    code = "import sys, shoal.optim; sys.exit('numba' in sys.modules or any('shoal_' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_text_form_has_groups_in_order() -> None:
    parsed = optim_text.parse("adamw:lr=0.001,group=embed/*|frozen,group=*bias|weight_decay=0|rate=2,weight_decay=0.1")
    groups = (optim.VariableGroup("embed/*", frozen=True), optim.VariableGroup("*bias", 2, weight_decay=0))
    assert parsed == optim.AdamW(0.001, weight_decay=0.1, groups=groups)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: UNTYPED.SGD(lr=0.1, momentum=0.9),
            "shoal.optim.SGD() got an unexpected keyword argument 'momentum'; use",
        ),
        (lambda: UNTYPED.SGD(nesterov=True), "shoal.optim.Momentum(lr=..., nesterov=True)"),
        (lambda: UNTYPED.Momentum(dampening=0), "leave it out: the optimizer momentum"),
        (lambda: UNTYPED.AdamW(amsgrad=True), "Shoal has no AMSGrad"),
        (lambda: UNTYPED.Adam(beta_1=0.9), "did you mean beta1?"),
        (lambda: UNTYPED.FTRL(fused=True), "leave it out"),
        (lambda: UNTYPED.CosineLR(0.1, T_max=10), "did you mean steps?"),
        (lambda: UNTYPED.ReduceOnPlateau(min_lr=0.1), "did you mean minimum?"),
        (lambda: UNTYPED.VariableGroup("*", lr=0.1), "give rate, a factor of the optimizer's learning rate"),
    ],
)
def test_an_argument_of_another_library_says_what_to_give_instead(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError) as caught:
        build()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sgd:group=*bias", r"the group for '\*bias' has no setting; give one, such as group=\*bias\|rate=0.1"),
        ("sgd:group=*bias|decay=1", r"'decay=1' of the group for '\*bias' is no setting, or is repeated; give rate="),
        ("sgd:group=*bias|frozen=1", "'frozen=1' of the group"),
        ("sgd:group=*bias|rate", "'rate' of the group"),
        ("sgd:group=*bias|rate=1|rate=2", "'rate=2' of the group"),
        ("sgd:group=*bias|rate=-1", r"group '\*bias': rate is -1; it must be finite and at least 0"),
        ("sgd:group=*bias|rate=x", r"group '\*bias': rate is 'x'"),
        ("sgd:group=|rate=1", "the pattern of a group is ''"),
        ("sgd:groups=*bias", "sgd: unknown groups; with this schedule it takes"),
        ("sgd:momentum=0.9", "sgd: unknown momentum; use the optimizer momentum"),
    ],
)
def test_groups_of_the_text_form_that_are_no_groups_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidOptimizer, match=says):
        optim_text.parse(text)

"""Names of variables, and errors about layers with invalid settings or inputs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal_nn import (
    AvgPool,
    BatchNorm,
    ByFeature,
    Column,
    Concat,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Embedding,
    FeatureCross,
    Flatten,
    Frozen,
    GlobalAvgPool,
    Layer,
    LayerNorm,
    MaxPool,
    Parallel,
    ReLU,
    Residual,
    Sequential,
    TrainingContext,
    one_by_one,
)
from shoal_nn.models import mlp

NET = Sequential(
    {
        "stem": Conv2D(4, bias=False, input_gradient=False),
        "block": Residual(Sequential([BatchNorm(), ReLU(), Conv2D(6)]), Conv2D(6, window=1, bias=False)),
        "pool": GlobalAvgPool(),
        "heads": Parallel({"a": Dense(2), "b": Dense(3, bias=False)}, Concat()),
    }
)
SHAPES = {
    "stem/kernel": (3, 3, 2, 4),
    "block/body/0/scale": (4,),
    "block/body/0/bias": (4,),
    "block/body/2/kernel": (3, 3, 4, 6),
    "block/body/2/bias": (6,),
    "block/shortcut/kernel": (1, 1, 4, 6),
    "heads/a/kernel": (6, 2),
    "heads/a/bias": (2,),
    "heads/b/kernel": (6, 3),
}
STATE = {"block/body/0/mean": (4,), "block/body/0/var": (4,)}


# The same classes, for settings of a wrong type.
any_conv: Callable[..., Layer] = Conv2D
any_max_pool: Callable[..., Layer] = MaxPool
any_avg_pool: Callable[..., Layer] = AvgPool


class TestNames:
    def test_children_come_before_their_variables(self) -> None:
        params, state = NET.init(np.random.default_rng(0), (5, 5, 2))
        assert {name: array.shape for name, array in params.items()} == SHAPES
        assert {name: array.shape for name, array in state.items()} == STATE

    def test_gradients_and_state_have_the_same_names(self) -> None:
        params, state = NET.init(np.random.default_rng(0), (5, 5, 2))
        y, after, pullback = NET.apply(params, state, np.ones((2, 5, 5, 2), np.float32), TrainingContext(0))
        dparams, dx = pullback(y)
        assert {name: array.shape for name, array in dparams.items()} == SHAPES
        assert {name: array.shape for name, array in after.items()} == STATE
        assert dx is None
        assert NET.output_shape((5, 5, 2)) == y.shape[1:] == (5,)

    def test_a_job_s_variables_are_these(self) -> None:
        variables = NET.variables((5, 5, 2))
        assert {name: kept.shape for name, kept in variables.items() if kept.trainable} == SHAPES
        assert {name: kept.shape for name, kept in variables.items() if not kept.trainable} == STATE
        assert all(isinstance(kept, shoal.Variable) for kept in variables.values())
        assert {variables[name].aggregation.name for name in STATE} == {"MEAN"}

    def test_a_list_is_numbered(self) -> None:
        assert [name for name, _ in Sequential([ReLU(), Flatten()]).layers] == ["0", "1"]

    def test_layers_are_values(self) -> None:
        assert Sequential([Conv2D(3), ReLU()]) == Sequential({"0": Conv2D(3), "1": ReLU()})
        assert hash(NET) == hash(NET)
        with pytest.raises(AttributeError):
            Dense(3).units = 4  # type: ignore[misc]  # it is to fail


class TestFirstValues:
    def test_follow_from_the_generator(self) -> None:
        one, same, other = (NET.init(np.random.default_rng(seed), (5, 5, 2))[0] for seed in (1, 1, 2))
        for name in one:
            np.testing.assert_array_equal(one[name], same[name])
        assert (one["stem/kernel"] != other["stem/kernel"]).any()
        assert (one["heads/a/kernel"][:, :2] != one["heads/b/kernel"][:, :2]).any()

    def test_are_float32_and_of_the_spread_that_the_initializer_says(self) -> None:
        params, state = Sequential([Dense(400), BatchNorm()]).init(np.random.default_rng(0), (300,))
        assert {array.dtype for array in (params | state).values()} == {np.dtype(np.float32)}
        assert params["0/kernel"].std() == pytest.approx((2 / 300) ** 0.5, rel=0.02)
        assert (params["1/scale"] == 1).all()
        assert (state["1/var"] == 1).all()
        for begins_with_0 in (params["0/bias"], params["1/bias"], state["1/mean"]):
            assert not begins_with_0.any()


# A layer, what it was made for, what it is fed, and what it says it wants.
MISFITS = [
    (Dense(3), (4,), (5,), "(..., 4)"),
    (Dense(3), (4,), (), "(..., 4)"),
    (Conv2D(3), (6, 6, 4), (6, 6, 5), "(height, width, 4)"),
    (Conv2D(3), (6, 6, 4), (6, 4), "(height, width, 4)"),
    (Conv2D(4, groups=2), (6, 6, 4), (6, 6, 5), "(height, width, 4)"),
    (Conv2D(3, window=5, padding="valid"), (6, 6, 4), (4, 6, 4), "images of 5x5 at least"),
    (DepthwiseConv2D(2), (6, 6, 4), (6, 6, 8), "(height, width, 4)"),
    (BatchNorm(), (6, 4), (6, 5), "(..., 4)"),
    (LayerNorm(), (6, 4), (4, 6), "(..., 4)"),
    (MaxPool(3), (6, 6, 4), (2, 6, 4), "images of 3x3 at least"),
    (AvgPool(2), (6, 6, 4), (6, 4), "three axes: (height, width, channels)"),
    (GlobalAvgPool(), (6, 4), (4,), "at least two axes: (..., channels)"),
]


class TestWrongShapes:
    @pytest.mark.parametrize(("layer", "shape", "fed", "wants"), MISFITS, ids=lambda value: str(value)[:30])
    def test_name_the_layer_the_given_and_the_needed_shape(
        self, layer: Layer, shape: tuple[int, ...], fed: tuple[int, ...], wants: str
    ) -> None:
        net = Sequential({"features": Residual(Sequential([layer]), Sequential([layer])), "relu": ReLU()})
        params, state = net.init(np.random.default_rng(0), shape)
        with pytest.raises(errors.InvalidShape) as caught:
            net.apply(params, state, np.ones((2, *fed), np.float32), TrainingContext(0))
        error = caught.value
        assert re.match(rf"layer 'features/body/0' \({type(layer).__name__}\) got samples of shape ", error.message)
        assert f"shape {fed}, but needs" in error.message
        assert wants in error.message
        assert error.details["layer"] == "features/body/0"
        assert error.details["got"] == str(fed)

    @pytest.mark.parametrize(
        ("layer", "fed"),
        [
            (Dense(3), ()),
            (Conv2D(3), (6, 4)),
            (Conv2D(3, window=5, padding="valid"), (4, 6, 4)),
            (Conv2D(4, groups=2), (6, 6, 3)),
            (BatchNorm(), ()),
            (LayerNorm(), ()),
            (MaxPool(3), (2, 6, 4)),
        ],
        ids=repr,
    )
    def test_are_found_before_there_are_variables(self, layer: Layer, fed: tuple[int, ...]) -> None:
        net = Sequential({"relu": ReLU(), "deep": Sequential({"it": layer})})
        for ask in (net.output_shape, net.variables, lambda shape: net.init(np.random.default_rng(0), shape)):
            with pytest.raises(errors.InvalidShape, match=r"layer 'deep/it' .* got .* needs") as caught:
                ask(fed)
            assert str(fed) in caught.value.message

    def test_by_itself_a_layer_is_named_by_its_kind(self) -> None:
        with pytest.raises(
            errors.InvalidShape, match=r"^layer Dense got samples of shape \(\), but needs at least one axis"
        ):
            Dense(3).output_shape(())

    def test_branches_that_do_not_go_together_are_all_named(self) -> None:
        net = Sequential({"both": Parallel({"a": Dense(2), "b": Dense(3)})})
        says = r"layer 'both' \(Parallel\) got .*\(4,\), but needs such that Add can merge .* a \(2,\), b \(3,\)"
        with pytest.raises(errors.InvalidShape, match=says):
            net.init(np.random.default_rng(0), (4,))

    def test_an_embedding_wants_whole_numbers(self) -> None:
        layer = Embedding(4, 2)
        with pytest.raises(errors.InvalidShape, match="needs integers, not float32"):
            layer.apply(layer.init(np.random.default_rng(0), (3,))[0], {}, np.ones((2, 3), np.float32), False)

    @pytest.mark.parametrize("layer", [Dense(3), Conv2D(3), DepthwiseConv2D(), BatchNorm(), LayerNorm()], ids=repr)
    @pytest.mark.parametrize("dtype", ["uint8", "int64", "int16", "bool"])
    def test_floats_are_demanded_where_something_is_learned(self, layer: Layer, dtype: str) -> None:
        net = Sequential({"it": layer})
        params, state = net.init(np.random.default_rng(0), (4, 4, 2))
        with pytest.raises(errors.InvalidShape, match=rf"^layer 'it' .* needs floats, not {dtype} .*augment\.ToFloat"):
            net.apply(params, state, np.ones((2, 4, 4, 2), dtype), TrainingContext(0))


class TestVariables:
    @pytest.mark.parametrize(
        ("layer", "name", "shape"),
        [
            (Dense(3), "kernel", r"\[any, 3\]"),
            (Dense(3), "bias", r"\[3\]"),
            (Conv2D(4, window=(3, 2)), "kernel", r"\[3, 2, any, 4\]"),
            (Conv2D(4), "bias", r"\[4\]"),
            (DepthwiseConv2D(), "kernel", r"\[3, 3, 1, any\]"),
            (BatchNorm(), "scale", r"\[any\]"),
            (BatchNorm(), "var", r"\[2\]"),
            (LayerNorm(), "bias", r"\[2\]"),
            (Embedding(4, 2), "table", r"\[4, 2\]"),
        ],
        ids=repr,
    )
    def test_that_are_missing_or_of_another_shape_are_named_with_their_layer(
        self, layer: Layer, name: str, shape: str
    ) -> None:
        net = Sequential({"deep": Sequential({"it": layer})})
        params, state = net.init(np.random.default_rng(0), (4, 4, 2))
        x = np.zeros((2, 4, 4, 2), int if isinstance(layer, Embedding) else float)
        where = rf"^layer 'deep/it' \({type(layer).__name__}\) got "
        held = {**params, **state}
        missing = {key: array for key, array in held.items() if not key.endswith(f"/{name}")}
        with pytest.raises(
            errors.InvalidShape, match=rf"{where}variables, but not '{name}', but needs {shape}; change"
        ):
            net.apply(missing, missing, x, False)
        wrong = {**held, f"deep/it/{name}": np.ones((2, 5, 1))}
        says = rf"{where}the variable '{name}' of shape \(2, 5, 1\), but needs {shape}; change"
        with pytest.raises(errors.InvalidShape, match=says):
            net.apply(wrong, wrong, x, False)


@pytest.mark.parametrize(
    "layer",
    [BatchNorm(), Dropout(0.5), Sequential([ReLU()]), Residual(ReLU()), Sequential([Residual(Dropout(0.1))])],
    ids=repr,
)
@pytest.mark.parametrize("train", [True, None, 1, 0, "yes"])
def test_train_is_training_or_false(layer: Layer, train: Any) -> None:
    params, state = layer.init(np.random.default_rng(0), (3,))
    with pytest.raises(errors.InvalidLayer, match=r"train is .*; give TrainingContext\(seed\) or False"):
        layer.apply(params, state, np.ones((2, 3)), train)


class TestWithoutAGradientByTheInput:
    @pytest.mark.parametrize(
        "blind",
        [
            Frozen(Dense(4)),
            Residual(Frozen(Dense(4))),
            Sequential([Frozen(Dense(4))]),
        ],
        ids=lambda layer: type(layer).__name__,
    )
    def test_a_layer_after_one_that_learns_is_named(self, blind: Layer) -> None:
        net = Sequential({"a": Dense(4), "relu": ReLU(), "b": blind, "c": Dense(2)})
        params, state = net.init(np.random.default_rng(0), (4,))
        y, _, pullback = net.apply(params, state, np.ones((3, 4), np.float32), TrainingContext(0))
        with pytest.raises(errors.InvalidLayer, match=r"layer 'b' gives no gradient .*, so 'a' before it"):
            pullback(y)

    def test_it_may_follow_layers_that_learn_nothing(self) -> None:
        net = Sequential({"a": Frozen(Dense(4)), "relu": ReLU(), "b": Frozen(Dense(4)), "c": Dense(2)})
        params, state = net.init(np.random.default_rng(0), (4,))
        y, _, pullback = net.apply(params, state, np.ones((3, 4), np.float32), TrainingContext(0))
        found, dx = pullback(y)
        assert found.keys() == params.keys() == {"c/kernel", "c/bias"}
        assert dx is None


PEOPLE = {"job": np.array([2, 0, 1]), "age": np.array([0.3, 0.1, 0.9], np.float32), "unused": np.zeros((3, 2))}


class TestFeatures:
    NET = ByFeature({"age": Column(), "job": Embedding(3, 4)}, Concat())

    def test_each_branch_is_fed_its_own(self) -> None:
        params, state = self.NET.init(np.random.default_rng(0), {"age": (), "job": ()})
        assert params.keys() == {"job/table"}
        y, after, pullback = self.NET.apply(params, state, PEOPLE, False)
        np.testing.assert_array_equal(y[:, 0], PEOPLE["age"])
        np.testing.assert_array_equal(y[:, 1:], params["job/table"][PEOPLE["job"]])
        assert after == {}
        found, dx = pullback(y)
        assert found.keys() == params.keys()
        assert dx is None
        assert self.NET.output_shape({"age": (), "job": ()}) == (5,)

    def test_containers_pass_on_features_by_name(self) -> None:
        branch = Sequential({"features": self.NET, "head": Dense(2)})
        net = Parallel({"a": branch, "b": Residual(branch, branch)})
        params, _ = net.init(np.random.default_rng(0), {"age": (), "job": ()})
        assert "b/shortcut/features/job/table" in params
        y, _, pullback = net.apply(params, {}, PEOPLE, TrainingContext(0))
        assert y.shape == (3, 2)
        assert pullback(y)[0].keys() == params.keys()

    @pytest.mark.parametrize(
        ("layer", "fed", "got", "wants"),
        [
            (NET, {"age": ()}, "{age: ()}", "features by name, age, job; missing: job"),
            (NET, {}, "{}", "features by name, age, job; missing: age, job"),
            (NET, (3,), "(3,)", "features by name, age, job; missing: age, job"),
            (NET, {"age": (2,), "job": ()}, "{age: (2,), job: ()}", "age (2, 1), job (4,)"),
            (FeatureCross("a", "b", 9), {"a": ()}, "{a: ()}", "features by name, a, b; missing: b"),
            (FeatureCross("a", "b", 9), (), "()", "features by name, a, b; missing: a, b"),
            (FeatureCross("a", "b", 9), {"a": (), "b": (2,)}, "{a: (), b: (2,)}", "a and b of the same shape"),
        ],
        ids=str,
    )
    def test_that_are_missing_or_do_not_fit_are_named(
        self, layer: Layer, fed: tuple[int, ...] | Mapping[str, tuple[int, ...]], got: str, wants: str
    ) -> None:
        net = Sequential({"deep": Sequential([layer])})
        dtypes = {"age": float}
        x = (
            np.ones((3, *fed))
            if isinstance(fed, tuple)
            else {name: np.zeros((3, *shape), dtypes.get(name, int)) for name, shape in fed.items()}
        )
        for ask in (
            lambda: net.output_shape(fed),
            lambda: net.variables(fed),
            lambda: net.apply({"deep/0/job/table": np.ones((3, 4))}, {}, x, False),
        ):
            with pytest.raises(errors.InvalidShape) as caught:
                ask()
            error = caught.value
            kind = type(layer).__name__
            assert error.message.startswith(f"layer 'deep/0' ({kind}) got samples of shape {got}, but needs ")
            assert wants in error.message

    def test_of_the_wrong_kind(self) -> None:
        with pytest.raises(errors.InvalidShape, match=r"layer 'age' \(Column\) got .* needs floats, not int64"):
            self.NET.apply({"job/table": np.ones((3, 4))}, {}, {**PEOPLE, "age": PEOPLE["job"]}, False)
        with pytest.raises(errors.InvalidShape, match=r"FeatureCross got .* needs integers, not int64 and float32"):
            FeatureCross("job", "age", 9).apply({}, {}, PEOPLE, False)


class TestFrozen:
    NET = Sequential([Conv2D(3), BatchNorm(), Dropout(0.5)])

    def test_has_the_variables_of_its_layer_but_none_trainable(self) -> None:
        ours, theirs = Frozen(self.NET).variables((4, 4, 2)), self.NET.variables((4, 4, 2))
        assert {name: (it.shape, it.dtype, it.initializer) for name, it in ours.items()} == {
            name: (it.shape, it.dtype, it.initializer) for name, it in theirs.items()
        }
        assert not any(it.trainable for it in ours.values())
        assert {it.aggregation.name for it in ours.values()} == {"LAST"}

    def test_is_applied_as_in_evaluation_and_learns_nothing(self) -> None:
        params, state = self.NET.init(np.random.default_rng(0), (4, 4, 2))
        state["1/mean"] += 3
        x = np.random.default_rng(1).normal(size=(2, 4, 4, 2)).astype(np.float32)
        expected, _, pull = self.NET.apply(params, state, x, False)
        y, after, pullback = Frozen(self.NET).apply({}, params | state, x, TrainingContext(3))
        np.testing.assert_array_equal(y, expected)
        assert after == {}
        assert pullback(y) == ({}, None)
        found, dx = Frozen(self.NET, input_gradient=True).apply({}, params | state, x, TrainingContext(3))[2](y)
        assert found == {}
        np.testing.assert_array_equal(dx, pull(y)[1])

    def test_a_wrong_shape_is_its_layer_s(self) -> None:
        net = Sequential({"body": Frozen(Sequential({"conv": Conv2D(3)}))})
        with pytest.raises(errors.InvalidShape, match=r"layer 'body/conv' \(Conv2D\)"):
            net.output_shape((4, 4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Dense(0), "Dense: units is 0"),
        (lambda: Embedding(0, 3), "Embedding: the table is"),
        (lambda: Conv2D(0), "Conv2D: 0 filters in 1 groups"),
        (lambda: Conv2D(4, groups=3), "Conv2D: 4 filters in 3 groups"),
        (lambda: Conv2D(4, window=(0, 1)), "Conv2D: window is"),
        (lambda: Conv2D(4, strides=0), "Conv2D: strides are 0"),
        (lambda: any_conv(4, padding="full"), "Conv2D: padding is 'full'"),
        (lambda: Conv2D(4, padding=(0, -1)), "Conv2D: padding is"),
        (lambda: any_conv(4, padding=(1, 2, 3)), "Conv2D: padding is (1, 2, 3)"),
        (lambda: any_conv(4, padding=((1, 2, 3), 0)), "Conv2D: padding is ((1, 2, 3), 0)"),
        (lambda: any_conv(4, window=(3, 3, 3)), "Conv2D: window is (3, 3, 3); give 1 or more, or two such numbers"),
        (lambda: any_conv(4, strides="a"), "Conv2D: strides are 'a'; give 1 or more, or two such numbers"),
        (lambda: any_max_pool([3]), "MaxPool: window is [3]"),
        (lambda: DepthwiseConv2D(0), "DepthwiseConv2D: multiplier is 0"),
        (lambda: MaxPool(0), "MaxPool: window is 0"),
        (lambda: MaxPool(2, 0), "MaxPool: strides are 0"),
        (lambda: MaxPool(2, padding=2), "MaxPool: padding is 2"),
        (lambda: any_avg_pool(2, padding="full"), "AvgPool: padding is 'full'"),
        (lambda: BatchNorm(momentum=2), "BatchNorm: momentum is 2"),
        (lambda: BatchNorm(epsilon=0), "BatchNorm: epsilon is 0"),
        (lambda: LayerNorm(0), "LayerNorm: epsilon is 0"),
        (lambda: Dropout(1), "Dropout: rate is 1"),
        (lambda: Sequential({"a/b": ReLU()}), "Sequential: 'a/b' is not a valid name of a layer"),
        (lambda: Parallel({"": ReLU()}), "Parallel: '' is not a valid name of a layer"),
        (lambda: Parallel([]), "Parallel: it has no branch"),
        (lambda: ByFeature({}), "ByFeature: it has no branch"),
        (lambda: FeatureCross("a", "b", 0), "FeatureCross: rows is 0"),
    ],
)
def test_invalid_settings_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(errors.InvalidLayer, match=re.escape(says)):
        make()


@pytest.mark.parametrize("kind", [Conv2D, MaxPool])
def test_pairs_of_settings_may_be_lists(kind: Callable[..., Layer]) -> None:
    first = (4,) if kind is Conv2D else ()
    given = kind(*first, window=[3, 2], strides=[2, 1], padding=[[1, 0], 1])
    same = kind(*first, window=(3, 2), strides=(2, 1), padding=((1, 0), 1))
    assert given.output_shape((7, 7, 2)) == same.output_shape((7, 7, 2)) == (3, 8, given.output_shape((7, 7, 2))[2])


class TestOneByOne:
    """Gradients of a sequence, as they are known."""

    def test_of_a_sequence_those_of_the_last_layer_come_first_while_others_are_not_computed(self) -> None:
        net = Sequential({"a": Dense(4), "relu": ReLU(), "b": Dense(3), "c": Dense(2)})
        params, state = net.init(np.random.default_rng(0), (5,))
        x, dy = np.random.default_rng(1).normal(size=(6, 5)), np.ones((6, 2))
        _, _, pullback = net.apply(params, state, x, TrainingContext(0))
        pairs = one_by_one(pullback, dy)
        assert [next(pairs)[0], next(pairs)[0]] == ["c/kernel", "c/bias"]
        dy[...] = np.nan  # what was given is used up to there, and no more
        rest = dict(pairs)
        assert [*rest] == ["b/kernel", "b/bias", "a/kernel", "a/bias"]
        assert all(np.isfinite(gradient).all() for gradient in rest.values())

    @pytest.mark.parametrize(
        "net",
        [mlp(3), Parallel([Dense(3), Dense(3)]), Dense(3), Sequential([Sequential([Dense(4), Dense(3)])])],
        ids=str,
    )
    def test_they_equal_the_gradients_of_the_pullback(self, net: Layer) -> None:
        params, state = net.init(np.random.default_rng(0), (5,))
        x, dy = np.random.default_rng(1).normal(size=(6, 5)), np.random.default_rng(2).normal(size=(6, 3))
        _, _, pullback = net.apply(params, state, x, TrainingContext(0))
        found, wanted = dict(one_by_one(pullback, dy)), pullback(dy)[0]
        assert found.keys() == wanted.keys() == params.keys()
        for name, gradient in wanted.items():
            np.testing.assert_array_equal(found[name], gradient)

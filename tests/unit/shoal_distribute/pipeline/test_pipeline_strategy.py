"""PipelineStrategy: the result is that of one process with the same micro-batches, and each stage has its memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import GradientTape, OneDeviceStrategy, PipelineStrategy, keras
from support.traces import recorded, roots, tree

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)), RNG.normal(size=(24, 3))
STEPS = 3


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    yield
    keras.config.set_floatx("float32")


def residual(rate: float = 0.3) -> keras.Model:
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="first")(inputs)
    y = keras.layers.BatchNormalization(name="norm")(x)
    y = keras.layers.Dropout(rate, seed=1, name="dropout")(y)
    y = keras.layers.Dense(8, name="second")(y)
    outputs = keras.layers.Dense(3, name="last")(keras.layers.Add(name="add")([x, y]))
    return keras.Model(inputs, outputs, name="residual")


def tied(frozen: bool = False) -> keras.Model:
    inputs = keras.Input((6,))
    layer, dropout = keras.layers.Dense(6, "tanh", name="tied"), keras.layers.Dropout(0.3, seed=1, name="dropout")
    dropout.trainable = not frozen  # it draws numbers all the same
    x = dropout(layer(inputs))
    x = keras.layers.Dense(6, name="middle")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(dropout(layer(x))), name="tying")


def sequence() -> keras.Model:
    layers = [keras.layers.Dense(width, "tanh", name=f"dense_{number}") for number, width in enumerate((8, 8, 8, 3))]
    return keras.Sequential([keras.Input((6,)), *layers], name="net")


def in_one_process(
    build: Callable[[], keras.Model], micro_batches: int, optimizer: Any, steps: int = STEPS
) -> list[np.ndarray]:
    """Returns the variables after some steps that add up the gradients of micro-batches, as `PipelineStrategy` does."""
    keras.utils.set_random_seed(5)
    model, mse = build(), keras.losses.MeanSquaredError()
    made = optimizer()
    for _ in range(steps):
        sums: list[Any] = [0.0] * len(model.trainable_variables)
        for number in range(micro_batches):
            part = slice(24 * number // micro_batches, 24 * (number + 1) // micro_batches)
            with GradientTape() as tape:
                total, _ = mse.parts(Y[part], model(X[part], training=True))
            found = tape.gradient(total, model.trainable_variables)
            sums = [a + b.array for a, b in zip(sums, found, strict=True)]
        made.apply_gradients(zip([it / Y.size * 3 for it in sums], model.trainable_variables, strict=True))
    return model.get_weights()


def adam() -> Any:
    return keras.optimizers.Adam(0.05, global_clipnorm=0.5)


def in_stages(
    build: Callable[[], keras.Model], optimizer: Any = adam, steps: int = STEPS, **settings: Any
) -> tuple[Any, Any]:
    """Returns the variables after the same steps in stages, and the timings."""
    keras.utils.set_random_seed(5)
    with PipelineStrategy(**settings) as strategy:
        with strategy.scope():
            model = build()
            model.compile(optimizer(), "mse")
        model.fit(X, Y, batch_size=24, epochs=steps, shuffle=False, verbose=0)
        return model.get_weights(), strategy.timings()


def check_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_the_variables_are_those_of_one_process_with_the_same_micro_batches(micro_batches: int) -> None:
    expected = in_one_process(residual, micro_batches, adam, steps=30)
    for counts in ([3, 3], [2, 2, 2], [1, 2, 2, 1]):
        for schedule in ("1f1b", "gpipe"):
            settings = {"stages": len(counts), "cut": counts, "schedule": schedule, "micro_batches": micro_batches}
            found, timings = in_stages(residual, steps=30, **settings, recompute=schedule == "gpipe")
            check_equal(found, expected)
            held = [min(micro_batches, len(counts) - it) for it in range(len(counts))]
            assert [it.peak_held for it in timings.stages] == (
                held if schedule == "1f1b" else [micro_batches] * len(held)
            )


def test_layers_that_two_stages_share_have_one_value_and_the_random_numbers_of_one_process() -> None:
    for build, recompute in ((tied, False), (tied, True), (partial(tied, frozen=True), False)):
        expected = in_one_process(build, 4, adam)
        found, _ = in_stages(build, stages=3, micro_batches=4, cut=["middle", "last"], recompute=recompute)
        check_equal(found, expected)


def test_the_cut_is_measured_if_none_is_given() -> None:
    found, timings = in_stages(residual, stages=3, micro_batches=4)
    check_equal(found, in_one_process(residual, 4, adam))
    assert [name for stage in timings.stages for name in stage.layers] == [
        "first", "norm", "dropout", "second", "add", "last",
    ]  # fmt: skip


def test_a_model_without_a_known_input_shape_is_built_and_cut_with_its_first_batch() -> None:
    with PipelineStrategy(stages=2, micro_batches=2, cut=[1, 1]) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        model.fit([(X, Y), (X, Y)], verbose=0)
        assert [len(stage.layers) for stage in strategy.timings().stages] == [1, 1]
        with strategy.scope():
            model.add(keras.layers.Dense(3))  # with other layers, the cut no longer fits
        with pytest.raises(errors.BadRequest, match="3 in all"):
            model.predict(X, verbose=0)


def test_a_loop_with_a_tape_computes_the_whole_model() -> None:
    with PipelineStrategy(stages=2, micro_batches=1, cut=[2, 2]) as strategy:
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model, optimizer, mse = sequence(), adam(), keras.losses.MeanSquaredError()

        def step() -> None:
            with GradientTape() as tape:
                loss = mse(Y, model(X, training=True))
            optimizer.minimize(loss, model.trainable_variables, tape)

        for _ in range(STEPS):
            strategy.run(step)
        check_equal(model.get_weights(), in_one_process(sequence, 1, adam))


def test_evaluate_and_predict_compute_in_stages() -> None:
    with PipelineStrategy(stages=3, micro_batches=4) as strategy:
        with strategy.scope():
            model = residual()
            model.compile("sgd", "mse", metrics=["mae"])
        whole = np.asarray(model(X))
        np.testing.assert_allclose(model.predict(X, batch_size=7, verbose=0), whole, atol=1e-12)
        loss, error = model.evaluate(X, Y, batch_size=2, verbose=0)
        assert loss == pytest.approx(np.mean((whole - Y) ** 2))
        assert error == pytest.approx(np.mean(abs(whole - Y)))


def test_metrics_and_weights_of_samples_are_those_of_the_whole_batch() -> None:
    weights = RNG.uniform(size=24)

    def history(strategy: PipelineStrategy | None) -> dict[str, list[float]]:
        keras.utils.set_random_seed(5)
        if strategy is None:
            model = sequence()
            model.compile("sgd", "mse", metrics=["mae"])
        else:
            with strategy.scope():
                model = sequence()
                model.compile("sgd", "mse", metrics=["mae"])
        found = model.fit(X, Y, sample_weight=weights, batch_size=12, epochs=2, validation_split=0.5, verbose=0)
        return {name: list(map(float, values)) for name, values in found.history.items()}

    with PipelineStrategy(stages=2, micro_batches=5) as strategy:
        found, expected = history(strategy), history(None)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=1e-10)


def test_a_model_with_several_inputs_and_outputs_reads_each_input_where_it_is_used() -> None:
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    with PipelineStrategy(stages=3, micro_batches=2, cut=[1, 1, 1]) as strategy:
        with strategy.scope():
            x = keras.layers.Dense(6)(left)
            y = keras.layers.Dense(6)(x)
            model = keras.Model([left, right], [keras.layers.Add()([y, right]), x])
        whole = model([X, 2 * X])
        found = model.predict([X, 2 * X], verbose=0)
        for ours, theirs in zip(found, whole, strict=True):
            np.testing.assert_allclose(ours, np.asarray(theirs), atol=1e-12)


def without_dropout() -> keras.Model:
    return residual(0.0)  # the place in the random numbers of a layer is not part of a file


def test_a_checkpoint_loads_into_another_number_of_stages(tmp_path: Path) -> None:
    path, found = str(tmp_path / "model.shoal"), []
    for stages, steps in ((3, 1), (2, STEPS - 1)):
        keras.utils.set_random_seed(5)
        with PipelineStrategy(stages=stages, micro_batches=4) as strategy:
            with strategy.scope():
                model = without_dropout() if stages == 3 else keras.models.load_model(path)
                model.compile(adam(), "mse")
            model.fit(X, Y, batch_size=24, epochs=steps, shuffle=False, verbose=0)
            model.save(path)
            found = model.get_weights()
    check_equal(found, in_one_process(without_dropout, 4, adam))


def test_models_with_the_same_names_of_layers_do_not_take_each_others_slots() -> None:
    def trained(other: str) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with PipelineStrategy(stages=2, micro_batches=2, cut=[2, 1]) as strategy:
            with strategy.scope():
                names = ("hidden", "middle", "out")
                first = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(3, name=it) for it in names)])
                first.compile(adam(), "mse")
            first.fit(X, Y, batch_size=24, verbose=0)
            with strategy.scope():
                parts = (keras.layers.Dense(3, name="hidden"), keras.layers.Dense(3, name=other))
                second = keras.Sequential([keras.Input((6,)), *parts, keras.layers.Softmax()])
                second.compile(adam(), "mse")
            second.fit(X, Y, batch_size=24, verbose=0)
            first.fit(X, Y, batch_size=24, verbose=0)
            return first.get_weights()

    check_equal(trained("out"), trained("another"))


def test_a_model_trains_layers_that_another_model_has_placed_in_other_stages() -> None:
    def trained(stages: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with PipelineStrategy(stages=stages, micro_batches=2, cut=[4] if stages == 1 else [2, 2]) as strategy:
            with strategy.scope():
                a, b, c, d, e = (keras.layers.Dense(3, name=name) for name in "abcde")
                first = keras.Sequential([keras.Input((6,)), a, b, c, d])
                inputs = keras.Input((3,))
                second = keras.Model(inputs, c(e(c(b(inputs)))))  # both stages use what the last one has
                for model in (first, second):
                    model.compile(adam(), "mse")
            for _ in range(STEPS):
                first.train_on_batch(X, Y)
                second.train_on_batch(Y, Y)
            return [*first.get_weights(), *second.get_weights()]

    check_equal(trained(2), trained(1))


def test_a_model_that_exceeds_the_limit_of_one_device_trains_in_stages_under_it() -> None:
    with pytest.raises(errors.LimitExceeded, match=r"stage 0 \(dense_0 to dense_3, on /cpu:0\) needs .* is 6,000"):
        in_stages(sequence, stages=1, micro_batches=8, memory_limit=6000)
    with pytest.raises(errors.LimitExceeded, match=r"stage 0 \(dense_0, on /cpu:0\) needs .* 1,000; use another cut"):
        in_stages(sequence, stages=4, micro_batches=8, memory_limit=1000, cut=[1, 1, 1, 1])
    found, timings = in_stages(sequence, stages=4, micro_batches=8, memory_limit=6000, cut=[1, 1, 1, 1])
    check_equal(found, in_one_process(sequence, 8, adam))
    assert all(stage.fixed_bytes < stage.peak_bytes <= 6000 for stage in timings.stages)


def test_recomputation_keeps_less() -> None:
    settings: dict[str, Any] = {"stages": 2, "micro_batches": 8, "schedule": "gpipe", "cut": [3, 3]}
    kept, computed = (in_stages(residual, **settings, recompute=it)[1].stages for it in (False, True))
    assert all(ours.peak_bytes < theirs.peak_bytes for ours, theirs in zip(computed, kept, strict=True))


class Changing(keras.layers.Layer):
    """Gives the second micro-batch another shape than the first."""

    calls = 0

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.calls += training
        return keras.Tensor(inputs.array[:, : 6 - (self.calls > 1)])


def test_shapes_that_change_between_micro_batches_are_refused_and_end_the_step() -> None:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), Changing(name="odd"), keras.layers.Dense(3)])

    message = r"shape \(5,\) .* from layer odd in micro-batch 1, but \(6,\) .* let this layer return one shape"
    with pytest.raises(errors.InvalidShape, match=message):
        in_stages(build, stages=2, micro_batches=4, cut=[1, 1])


def test_a_stage_that_fails_ends_the_step_with_its_own_error() -> None:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(4)])

    with pytest.raises(errors.InvalidShape, match=r"labels of shape \(6, 3\)") as failure:
        in_stages(build, stages=2, micro_batches=4, cut=[1, 1])
    assert "raised in stage 1, on /cpu:1" in failure.value.__notes__


def test_a_closed_strategy_takes_no_step() -> None:
    with PipelineStrategy(stages=2, micro_batches=2, cut=[2, 2]) as strategy, strategy.scope():
        model = sequence()
        model.compile("sgd", "mse")
    with pytest.raises(errors.WrongContext, match="the strategy is closed, so its devices compute no more steps"):
        model.train_on_batch(X, Y)


def test_a_layer_with_statistics_cannot_be_in_two_stages() -> None:
    def build() -> keras.Model:
        inputs, norm = keras.Input((6,)), keras.layers.BatchNormalization(name="norm")
        return keras.Model(inputs, keras.layers.Dense(3)(norm(keras.layers.Dense(6)(norm(inputs)))))

    with pytest.raises(errors.InvalidLayer, match=r"layer norm .* is called in the stages 0 and 1, but has variables"):
        in_stages(build, stages=2, cut=[2, 2])


def test_a_layer_with_statistics_cannot_be_in_a_model_of_one_stage_and_in_another_stage() -> None:
    def build() -> keras.Model:
        inputs, norm = keras.Input((6,)), keras.layers.BatchNormalization(name="norm")
        within = keras.Model(inputs, norm(keras.layers.Dense(6)(inputs)))
        outer = keras.Input((6,))
        return keras.Model(outer, keras.layers.Dense(3)(norm(within(outer))))

    with pytest.raises(errors.InvalidLayer, match=r"layer norm of a model within .* is called in the stages 0 and 1"):
        in_stages(build, stages=2, cut=[1, 2])


def test_a_batch_with_fewer_samples_than_micro_batches_is_refused() -> None:
    with PipelineStrategy(stages=2, micro_batches=8) as strategy:
        with strategy.scope():
            model = sequence()
            model.compile("sgd", "mse")
        with pytest.raises(errors.InvalidData, match="a batch has 4 samples, fewer than micro_batches=8"):
            model.fit(X, Y, batch_size=20, verbose=0)  # before any step
        with pytest.raises(errors.InvalidData, match="a batch has 5 samples"):
            model.train_on_batch(X[:5], Y[:5])
        with pytest.raises(errors.BadRequest, match="no model of this strategy has taken a training step"):
            strategy.timings()


@pytest.mark.parametrize("options", [{"kernel_regularizer": "l2"}, {"activity_regularizer": "l2"}])
def test_a_regularizer_is_refused(options: dict[str, Any]) -> None:
    def build() -> keras.Model:
        penalized = keras.layers.Dense(6, **options)
        return keras.Sequential([keras.Input((6,)), penalized, keras.layers.Dense(3)])

    with pytest.raises(errors.WrongContext, match="PipelineStrategy does not add the penalties of regularizers"):
        in_stages(build, stages=2, cut=[1, 1])


def test_penalties_of_weights_count_in_evaluation_and_those_of_activities_are_refused() -> None:
    def loss_of(strategy: Any, **options: str) -> float:
        keras.utils.set_random_seed(5)
        with strategy, strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, **options), keras.layers.Dense(3)])  # type: ignore[arg-type]
            model.compile("sgd", "mse")
            return float(model.evaluate(X, Y, batch_size=24, verbose=0))

    def stages() -> PipelineStrategy:
        return PipelineStrategy(stages=2, cut=[1, 1])

    assert loss_of(stages(), kernel_regularizer="l2") == pytest.approx(
        loss_of(OneDeviceStrategy("/cpu:0"), kernel_regularizer="l2")
    )
    with pytest.raises(errors.WrongContext, match="PipelineStrategy does not add the penalties of regularizers"):
        loss_of(stages(), activity_regularizer="l2")


def test_a_layer_that_was_made_outside_of_the_scope_is_refused() -> None:
    outside = keras.layers.Dense(6, name="outside")

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), outside, keras.layers.Dense(3)])

    with pytest.raises(errors.WrongContext, match="variable outside/kernel was made outside of any scope"):
        in_stages(build, stages=2, cut=[1, 1])


def test_a_model_with_a_call_of_its_own_is_refused() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="own")
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.dense(inputs, training=training)

    with pytest.raises(errors.InvalidLayer, match=r"model own has a call\(\) of its own"):
        in_stages(Own, stages=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 0}, "stages is 0"),
        ({"micro_batches": 0}, "micro_batches is 0"),
        ({"devices": ["/cpu:0", "/cpu:1"], "stages": 3}, "stages is 3, but there are 2 devices"),
        ({"stages": 2, "memory_limit": [100]}, "one for each of 2 devices"),
        ({"stages": 2, "memory_limit": "1 GB"}, "memory_limit is '1 GB'; give a number of bytes above 0"),
        ({"stages": 2, "memory_limit": [100, None]}, r"memory_limit is \[100, None\]; give a number of bytes above 0"),
        ({"stages": 2, "micro_batches": 2.5}, "micro_batches is 2.5; it must be a whole number, 1 or more"),
        ({"stages": "2"}, "stages is '2'; it must be a whole number, 1 or more"),
        ({"stages": 2, "schedule": ["gpipe"]}, "schedule is .*; use 'gpipe' or '1f1b'"),
        ({"stages": 2, "cut": "dense"}, "cut is 'dense'; give a list of names"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        PipelineStrategy(**settings)


def test_timings_have_the_stages_and_the_bubble() -> None:
    _, timings = in_stages(sequence, stages=2, micro_batches=4, cut=["dense_2"])
    assert timings.steps == STEPS
    assert [it.layers for it in timings.stages] == [("dense_0", "dense_1"), ("dense_2", "dense_3")]
    assert timings.slowest in timings.stages
    assert 0 <= timings.bubble < 1
    assert all(it.compute_s + it.wait_s == pytest.approx(timings.seconds) for it in timings.stages)
    assert timings.bubble == pytest.approx(sum(it.bubble for it in timings.stages) / 2)
    assert [it.bubble for it in timings.stages] == pytest.approx([it.wait_s / timings.seconds for it in timings.stages])
    assert timings.ideal_bubble == 1 / 5
    lines = str(timings).splitlines()
    assert len(lines) == 5
    assert "dense_2 to dense_3" in lines[2]
    assert f"{timings.stages[1].bubble:.3f}" in lines[2]
    assert lines[3].endswith(f"stage {timings.slowest.stage} is the slowest")
    more = "equal stages would have 0.200 with 4 micro-batches, and 0.111 with 8"
    assert lines[4] == f"bubble {timings.bubble:.3f}; {more}"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_trace_of_a_step_has_its_messages(schedule: str) -> None:
    with (
        recorded() as recording,
        PipelineStrategy(stages=2, micro_batches=3, cut=[2, 2], schedule=schedule) as strategy,
    ):
        with strategy.scope():
            model = sequence()
            model.compile(adam(), "mse")
        model.train_on_batch(X, Y)
        model.predict(X[:4], verbose=0)
    step, prediction = roots(recording.spans, "run")
    sent = [it for it in recording.spans if it.trace == step.trace and it.attributes.get("shoal.direction")]
    assert {it.parent for it in sent} == {step.number}
    for what, direction, stages in (("activations", "forward", (0, 1)), ("gradients", "backward", (1, 0))):
        for verb, stage in zip(("send", "receive"), stages, strict=True):
            found = sorted(
                (it.attributes for it in sent if it.name == f"{verb} {what}"), key=lambda it: it["shoal.micro_batch"]
            )
            assert [it["shoal.micro_batch"] for it in found] == [0, 1, 2]
            place = {"stage": stage, "sender": stages[0], "receiver": stages[1], "direction": direction, "bytes": 512}
            for number, it in enumerate(found):
                assert it == {f"shoal.{name}": value for name, value in {**place, "micro_batch": number}.items()}
    assert tree(recording.spans, prediction) == {"send activations": 3, "receive activations": 3}


def test_a_trace_has_the_gradients_of_tied_layers() -> None:
    with recorded() as recording:
        in_stages(tied, stages=3, micro_batches=2, cut=["middle", "last"])
    found = [it.attributes for it in recording.spans if it.name == "send gradients of tied layers"]
    assert {it["shoal.bytes"] for it in found} == {6 * 6 * 8, 6 * 8}
    assert {(it["shoal.sender"], it["shoal.receiver"], it["shoal.micro_batch"]) for it in found} == {(1, 0, -1)}

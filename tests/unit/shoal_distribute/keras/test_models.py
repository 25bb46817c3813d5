"""Sequential and functional models: calls, names, variables, files and checkpoints, and wrong use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal_nn
from shoal import errors
from shoal.data import augment
from shoal_distribute import Checkpoint, CheckpointManager, MirroredStrategy, OneDeviceStrategy, keras, train
from shoal_nn.models import mobilenet_v2, small_cnn

UNTYPED: Any = keras
IMAGES = np.random.default_rng(0).normal(size=(6, 4, 4, 2)).astype(np.float32)


def branched() -> keras.Model:
    inputs = keras.Input((4, 4, 2))
    options: Any = {"kernel_initializer": "he_normal", "kernel_constraint": keras.constraints.MaxNorm(3, (0, 1, 2))}
    x = keras.layers.Conv2D(3, 3, padding="same", use_bias=False, **options)(inputs)
    x = keras.layers.Activation(keras.activations.relu)(keras.layers.BatchNormalization()(x))
    y = keras.layers.DepthwiseConv2D(3, padding="same", depth_multiplier=1)(x)
    merged = keras.layers.Concatenate()([keras.layers.Add()([x, y]), x])
    pooled = keras.layers.GlobalAveragePooling2D()(merged)
    hidden = keras.layers.Dense(4, "relu", kernel_regularizer="l2", bias_regularizer=keras.regularizers.L1(0.1))
    head = keras.Sequential([hidden, keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    return keras.Model(inputs, head(pooled), name="branched")


def test_a_sequential_model_is_built_by_an_input_or_by_its_first_batch() -> None:
    first = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    assert [it.shape for it in first.weights] == [(4, 3), (3,), (3, 2), (2,)]
    later = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    assert not later.built
    later(np.ones((1, 4)))
    assert later.count_params() == first.count_params() == 4 * 3 + 3 + 3 * 2 + 2
    shaped = keras.Sequential([keras.layers.Dense(3, input_shape=(4,))])
    shaped.add(keras.layers.Dense(1))
    assert shaped.outputs[0].shape == (None, 1)
    shaped.pop()
    assert shaped(np.ones((1, 4))).shape == (1, 3)


def test_a_functional_model_shares_layers_and_takes_several_inputs() -> None:
    a, b, shared = keras.Input((3,)), keras.Input((3,)), keras.layers.Dense(2)
    model = keras.Model([a, b], [shared(a), keras.layers.Subtract()([shared(a), shared(b)])])
    x, y = np.ones((2, 3)), np.zeros((2, 3))
    one, difference = model([x, y])
    np.testing.assert_allclose(difference.numpy(), np.ones((2, 3)) @ shared.get_weights()[0], rtol=1e-5)
    np.testing.assert_allclose(one.numpy(), difference.numpy(), rtol=1e-6)  # the bias is 0
    assert len(model.weights) == 2
    both = model.predict([x, y], verbose=0)
    assert [it.shape for it in both] == [(2, 2), (2, 2)]


def test_a_subclass_finds_its_layers() -> None:
    class Small(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.hidden, self.heads = keras.layers.Dense(3, "relu"), [keras.layers.Dense(1)]

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.heads[0](self.hidden(inputs, training=training))

    model = Small(name="small")
    assert model.name == "small"
    with pytest.raises(TypeError, match="did you mean 'name'"):
        Small(nme="small")
    model.compile("sgd", "mse")
    history = model.fit(np.ones((8, 2)), np.ones(8), epochs=5, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert len(model.trainable_variables) == 4


def test_freezing() -> None:
    model = branched()
    trained = len(model.trainable_variables)
    model.layers[2].trainable = False
    assert len(model.trainable_variables) == trained - 2
    model.trainable = False
    assert model.trainable_variables == []
    assert len(model.non_trainable_variables) == len(model.weights)


def test_a_layer_that_is_called_for_evaluation_keeps_its_statistics(tmp_path: Path) -> None:
    """As in fine-tuning with Keras: its variables are trained, but batch normalization keeps its moving averages."""
    inputs, base, path = keras.Input((4, 4, 2)), branched(), str(tmp_path / "model.npz")
    model = keras.Model(inputs, base(inputs, training=False))
    model.save(path)
    for tuned in (model, keras.models.load_model(path)):
        tuned.compile("sgd", "mse")
        fixed, trained = tuned.non_trainable_variables, tuned.trainable_variables
        before = [it.numpy() for it in fixed], [it.numpy() for it in trained]
        tuned.fit(IMAGES, np.ones((6, 2)), verbose=0)
        assert len(fixed) == 2
        for variable, value in zip(fixed, before[0], strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        # Not each of them: where no sample passes a ReLU, there is no gradient.
        assert any(not np.array_equal(it.numpy(), old) for it, old in zip(trained, before[1], strict=True))


def test_resizing_equals_that_of_the_data() -> None:
    resized = keras.layers.Resizing(7, 3)(IMAGES).numpy()
    np.testing.assert_allclose(resized, augment.resize(IMAGES, (7, 3)), rtol=1e-5, atol=1e-6)


def test_a_layer_of_shoal_nn_as_a_layer() -> None:
    model = keras.Sequential([keras.Input((4, 4, 2)), keras.layers.WrappedLayer(small_cnn(3))])
    assert model(IMAGES).shape == (6, 3)
    with pytest.raises(errors.InvalidLayer, match="cannot be saved, because its argument wrapped is a Sequential"):
        model.save("never.npz")


def test_published_models_start_from_weights_of_a_file(tmp_path: Path) -> None:
    net = mobilenet_v2(classes=3, width=0.1, style="keras")
    params, state = net.init(np.random.default_rng(0), (32, 32, 3))
    values: Any = {**params, **state}
    np.savez(tmp_path / "weights.npz", **values)
    options: dict[str, Any] = {"input_shape": (32, 32, 3), "alpha": 0.1, "weights": tmp_path / "weights.npz"}
    images = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)
    whole = keras.applications.MobileNetV2(classes=3, classifier_activation=None, **options)
    expected, _, _ = net.apply(params, state, images, False)
    np.testing.assert_allclose(whole.predict(images, verbose=0), expected, rtol=1e-5, atol=1e-6)
    base = keras.applications.MobileNetV2(include_top=False, pooling="avg", **options)
    base.trainable = False
    model = keras.Sequential([base, keras.layers.Dense(5, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    before = base.get_weights()
    model.fit(images, np.array([1, 2]), epochs=1, verbose=0)
    assert len(model.trainable_variables) == 2
    for a, b in zip(before, base.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(errors.InvalidLayer, match="give the path of a file"):
        keras.applications.ResNet50(weights="imagenet")
    with pytest.raises(errors.InvalidLayer, match="pooling is 'mean'"):
        keras.applications.MobileNetV2(include_top=False, pooling="mean")
    assert keras.applications.preprocess_input(np.array([0.0, 255.0])) == pytest.approx([-1, 1])


def test_the_summary_has_all_layers() -> None:
    lines: list[str] = []
    branched().summary(print_fn=lines.append)
    (text,) = lines
    assert "(Conv2D)" in text
    assert "(None, 4, 4, 3)" in text
    assert "Total params: 134" in text
    assert "Non-trainable params: 6" in text


def test_save_and_load(tmp_path: Path) -> None:
    model, path = branched(), str(tmp_path / "model.npz")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(IMAGES, np.ones((6, 2)), epochs=2, verbose=0)
    model.save(path)
    again = keras.models.load_model(path)
    with pytest.raises(errors.IncompatibleCheckpoint, match="use an optimizer of the kind that was saved"):
        again.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    np.testing.assert_array_equal(again.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))
    assert [it.name for it in again.layers] == [it.name for it in model.layers]
    assert [float(it) for it in again.losses] == [float(it) for it in model.losses] != []
    again.compile(keras.optimizers.Adam(0.01), "mse")
    assert again.optimizer is not None
    assert again.optimizer.iterations == 2
    assert again.optimizer.state().keys() == model.optimizer.state().keys()  # type: ignore[union-attr]
    other = branched()
    other.load_weights(path)
    np.testing.assert_array_equal(other.predict(IMAGES, verbose=0), model.predict(IMAGES, verbose=0))
    with pytest.raises(errors.StorageFailed, match="overwrite=True"):
        model.save_weights(path, overwrite=False)


def test_a_layer_can_add_a_loss_in_its_call() -> None:
    class Penalized(keras.layers.Activation):
        def call(self, inputs: keras.Tensor, training: bool = False) -> keras.Tensor:
            self.add_loss([(inputs * inputs).sum()])
            return super().call(inputs, training)

    inner = keras.Sequential([Penalized("linear")])
    model = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, kernel_regularizer=lambda w: w.sum())])
    model.set_weights([np.ones((2, 1)), np.zeros(1)])
    model(np.ones((1, 2)))
    model(np.full((3, 2), 2.0))
    assert [float(it) for it in model.losses] == [24, 2]
    with pytest.raises(errors.InvalidLayer, match="its argument kernel_regularizer is a function"):
        keras.Sequential([keras.Input((2,)), *model.layers[1:]]).save("unused")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(errors.UnknownCheckpoint, match="there is no file"):
        model.load_weights(str(tmp_path / "none.npz"))
    path = tmp_path / "weights.npz"
    model.save_weights(str(path))
    with pytest.raises(errors.IncompatibleCheckpoint, match="has no variable at 1/bias, but the model"):
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(3)]).load_weights(str(path))
    with pytest.raises(errors.CorruptCheckpoint, match="has variables only"):
        keras.models.load_model(str(path))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(errors.CorruptCheckpoint, match="damaged"):
        model.load_weights(str(path))
    with pytest.raises(errors.InvalidLayer, match="has no variables yet"):
        keras.Sequential([keras.layers.Dense(3)]).save_weights(str(path))


def test_checkpoints_of_models_and_optimizers(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    checkpoint = Checkpoint(model=model, optimizer=model.optimizer, epoch=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert manager.restore_or_initialize() is None
    for epoch in range(3):
        model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
        checkpoint.epoch = epoch
        manager.save()
    assert [Path(it).name for it in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    assert train.latest_checkpoint(tmp_path) == manager.latest_checkpoint
    twin = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    twin.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    other = Checkpoint(model=twin, optimizer=twin.optimizer, epoch=0)
    other.restore(manager.latest_checkpoint).assert_consumed().assert_existing_objects_matched()
    assert (other.epoch, other.save_counter, other.model) == (2, 3, twin)
    for it in (model, twin):
        it.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    np.testing.assert_array_equal(twin.get_weights()[0], model.get_weights()[0])
    with pytest.raises(errors.IncompatibleCheckpoint, match="has no 'other'"):
        Checkpoint(other=twin).restore(manager.latest_checkpoint)
    with pytest.raises(errors.BadRequest, match="got a str"):
        Checkpoint(name="x")


def test_attributes_of_a_checkpoint_and_what_it_has_restored(tmp_path: Path) -> None:
    checkpoint = Checkpoint(epoch=1, step=5)
    checkpoint.epoch += 2
    path = checkpoint.save(tmp_path / "ckpt")
    part = Checkpoint(epoch=0)
    status = part.restore(path).expect_partial()
    assert (part.epoch, checkpoint.objects) == (3, {"epoch": 3, "step": 5})
    with pytest.raises(errors.IncompatibleCheckpoint, match="ckpt-1 also has step"):
        status.assert_consumed()
    with pytest.raises(errors.UnknownCheckpoint, match="nothing was restored"):
        part.restore(None).assert_existing_objects_matched()
    with pytest.raises(AttributeError, match="has no object 'step'"):
        _ = part.step
    with pytest.raises(errors.BadRequest, match="only if it is a whole number"):
        part.epoch = "x"
    for name in ("save", "objects"):
        with pytest.raises(errors.BadRequest, match=f"would hide Checkpoint.{name}"):
            Checkpoint(**{name: 1})


def test_initial_values_follow_the_seed() -> None:
    values = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        values.append(branched().get_weights())
    for a, b in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)
    assert abs(values[0][0]).max() > 0


def test_variables_are_those_of_the_scope() -> None:
    strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        inside = keras.Sequential([keras.layers.Dense(2)])
    inside.build((3,))
    assert all(it.strategy is strategy and len(it.values) == 2 for it in inside.weights)
    outside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with strategy.scope(), pytest.raises(errors.WrongContext, match="belongs to a MirroredStrategy, but model"):
        outside.compile(keras.optimizers.SGD(), "mse")
    outside.compile("sgd", "mse")
    with strategy.scope(), pytest.raises(errors.WrongContext, match="was made outside of the scope of the MirroredStr"):
        outside.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    with OneDeviceStrategy("/cpu:0").scope():
        metric = keras.metrics.Mean()
    with pytest.raises(errors.WrongContext, match="metric mean"):
        strategy.run(metric.update_state, args=(1.0,))
    optimizer = keras.optimizers.SGD()
    optimizer.build(outside.trainable_variables)
    with pytest.raises(errors.WrongContext, match="in the scope of a MirroredStrategy"):
        optimizer.build(inside.trainable_variables)
    strategy.close()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: UNTYPED.layers.Dense(3, activaton="relu"), TypeError, "'activaton'; did you mean 'activation'"),
        (lambda: UNTYPED.layers.Conv2D(3, 3, trainble=True), TypeError, "did you mean 'trainable'"),
        (
            lambda: keras.layers.Dense(3, "rellu"),
            errors.BadRequest,
            "'rellu' is unknown; did you mean 'relu'",
        ),
        (lambda: keras.layers.Dense(3, kernel_initializer="glorot"), errors.BadRequest, "did you mean 'glorot_n"),
        (lambda: keras.layers.Dense(3, kernel_regularizer="l3"), errors.BadRequest, "did you mean 'l1'|'l2'"),
        (lambda: keras.layers.Dense(3, bias_regularizer=0.1), errors.BadRequest, "a regularizer is 0.1"),
        (lambda: keras.regularizers.L2(-1), errors.BadRequest, "l2 of a regularizer is -1"),
        (lambda: keras.losses.get("categorical_crosentropy"), errors.BadRequest, "did you mean 'categorical_cr"),
        (lambda: UNTYPED.losses.Huber(dleta=1), TypeError, "did you mean 'delta'"),
        (lambda: keras.losses.MeanSquaredError("summ"), errors.BadRequest, "did you mean 'sum'"),
        (lambda: keras.metrics.get("acuraccy"), errors.BadRequest, "did you mean 'accuracy'"),
        (lambda: keras.optimizers.get("adem"), errors.BadRequest, "did you mean 'adam'"),
        (lambda: UNTYPED.optimizers.Adam(beta1=0.9), TypeError, "did you mean 'beta_1'"),
        (lambda: keras.layers.Conv2D(3, 3, padding="full"), errors.InvalidLayer, "padding is 'full'"),  # type: ignore[arg-type]
        (lambda: keras.layers.Conv2D(3, 3, dilation_rate=2), errors.InvalidLayer, "dilation_rate=2"),
        (lambda: keras.layers.Flatten("channels_first"), errors.InvalidLayer, "channels_first"),
        (lambda: keras.layers.Resizing(3, 3, antialias=True), errors.InvalidLayer, "antialias is not supported"),
        (lambda: keras.layers.Resizing(3, 0), errors.InvalidLayer, r"size is \(3, 0\)"),
        (lambda: keras.layers.Resizing(3, 3, "bicubic"), errors.InvalidLayer, "method is 'bicubic'"),  # type: ignore[arg-type]
        (lambda: keras.layers.RandomFlip("horizontl"), errors.InvalidLayer, "did you mean 'horizontal'"),
        (lambda: keras.layers.RandomRotation(2.0), errors.InvalidLayer, "factor is 2.0; give a number, or two"),
        (lambda: keras.layers.RandomZoom(0.1, fill_mode="edge"), errors.InvalidLayer, "fill_mode is 'edge'"),
        (lambda: keras.layers.RandomContrast(-0.1), errors.InvalidLayer, "factor is -0.1; give a number from 0 to 1"),
        (lambda: keras.layers.RandomContrast((-0.3, -0.1)), errors.InvalidLayer, "the second from 0"),
        (lambda: keras.layers.RandomContrast(0.1, value_range=1), errors.InvalidLayer, "value_range is 1; give two"),  # type: ignore[arg-type]
        (lambda: keras.layers.RandomCrop(2, 2, data_format="channels_first"), errors.InvalidLayer, "channels_first"),
        (lambda: keras.layers.Softmax(axis=1), errors.InvalidLayer, "the axis must be -1"),
        (lambda: keras.layers.ReLU(max_value=3), errors.InvalidLayer, "max_value=6"),
        (keras.layers.Normalization, errors.InvalidLayer, "a mean and a variance"),
        (keras.Input, errors.InvalidLayer, "give the lengths"),
        (lambda: keras.layers.Add()([keras.Input((2,))]), errors.InvalidLayer, r"such as Add\(\)\(\[x, y\]\)"),
        (lambda: keras.layers.Add()([keras.Input((2,)), keras.Input((3,))]), errors.InvalidShape, "the same shape"),
        (lambda: keras.layers.Dense(2)(keras.Input(())), errors.InvalidShape, "at least one axis"),
        (lambda: keras.Model(keras.Input((2,)), keras.Input((2,))), errors.InvalidLayer, "not among the inputs"),
        (
            lambda: keras.Model(keras.Input((2,)), np.ones(2)),
            errors.InvalidLayer,
            "what keras.Input returns",
        ),
        (lambda: keras.Sequential([shoal_nn.Dense(2)]), errors.InvalidLayer, "give objects of keras.layers"),
        (
            lambda: keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="a")]),
            errors.InvalidLayer,
            "more than one layer 'a'",
        ),
        (lambda: branched().get_layer("ad"), errors.BadRequest, "has no layer 'ad'; did you mean"),
        (lambda: branched()(np.ones((1, 4, 4, 3))), errors.InvalidShape, r"needs \(4, 4, 2\)"),
        (lambda: branched().set_weights([]), errors.InvalidShape, "set_weights got 0 arrays"),
        (lambda: keras.config.set_floatx("int8"), errors.BadRequest, "floatx is 'int8'"),
    ],
)
def test_wrong_use_is_explained(call: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()

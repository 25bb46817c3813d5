"""`image_classifier`: all formats, models and settings, and the errors about invalid ones."""

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shoal
from shoal import errors
from shoal.data import Arrays
from shoal.program import BlockDataset
from shoal_nn import (
    AreaUnderCurve,
    BinaryClassification,
    Dense,
    MulticlassClassification,
    Sequential,
    Supervised,
    supervised,
)
from shoal_nn.models import mlp
from shoal_nn.programs import MODELS, image_classifier
from support.programs.model_data import bright
from support.programs.model_steps import check_begin, check_step, trained

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 8, 8, 3), np.uint8)
LABELS = np.arange(40) % 4


@pytest.fixture(scope="module")
def npz(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("npz") / "train.npz"
    np.savez(path, images=IMAGES, labels=LABELS)
    return str(path)


def small(npz: str, model: str = "mlp", **settings: Any) -> Supervised:
    return image_classifier(npz, "npz", model, **{"classes": 4, **settings})


# Formats.


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist(folder: Path, packed: bool) -> str:
    for part, count in (("train", 12), ("t10k", 5)):
        for kind, array in (("images-idx3", IMAGES[:count, ..., 0]), ("labels-idx1", LABELS[:count])):
            content = idx(array)
            name = folder / f"{part}-{kind}-ubyte"
            name.with_suffix(".gz" if packed else "").write_bytes(gzip.compress(content) if packed else content)
    return str(folder)


def cifar(folder: Path) -> str:
    (folder / "batches.meta.txt").write_text("a\nb\nc\n\n")
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        images = RNG.integers(0, 256, (4, 3072), np.uint8)
        labels = np.array([[0], [1], [2], [1]], np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, images], axis=1).tobytes())
    return str(folder)


def pictures(folder: Path, part: str, classes: tuple[str, ...] = ("ant", "bee"), each: int = 6) -> str:
    for label, name in enumerate(classes):
        for number in range(each):
            path = folder / part / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 7 + number), (100 * label, number, 0)).save(path)
    return str(folder)


def check_program(program: Supervised, shape: tuple[int, int, int], training: int, judging: int) -> None:
    """The program has these samples, and takes a step and an evaluation."""
    assert (program.shape, len(program.dataset), len(program.held_out)) == (shape, training, judging)
    values = check_begin(program)
    assert np.isfinite(check_step(program, values).loss)
    x, _ = program.held_out.batch(np.arange(judging))
    assert x.dtype == np.float32
    found = shoal.evaluate(program, values, batch_size=3)
    assert found.keys() == {"loss", "accuracy"}
    assert np.isfinite(found["loss"])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_idx(tmp_path: Path, packed: bool) -> None:
    check_program(image_classifier(mnist(tmp_path, packed), "idx", "mlp"), (8, 8, 1), 12, 5)


def test_cifar10(tmp_path: Path) -> None:
    check_program(image_classifier(cifar(tmp_path), "cifar10", "mlp", 3), (32, 32, 3), 20, 4)
    check_program(image_classifier(str(tmp_path), "cifar10", "mlp", 3, size=8), (8, 8, 3), 20, 4)


def test_folders(tmp_path: Path) -> None:
    check_program(
        image_classifier(pictures(tmp_path, "train"), "folder", "mlp", 2, size=8, held_out_share=0.25), (8, 8, 3), 9, 3
    )
    check_program(image_classifier(pictures(tmp_path, "test", each=2), "folder", "mlp", 2, size=8), (8, 8, 3), 12, 4)


def test_folders_whose_first_image_cannot_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train/ant").mkdir(parents=True)
    (tmp_path / "train/ant/0.png").write_text("no image")
    pictures(tmp_path, "train", each=3)
    (tmp_path / "train/ant/0.png").write_text("no image")
    program = image_classifier(str(tmp_path), "folder", "mlp", 2, size=4, held_out_share=0.5)
    assert (program.shape, len(program.dataset)) == ((4, 4, 3), 3)
    told = "".join(capfd.readouterr())
    assert "images_unreadable" in told
    assert "ant/0.png" in told


def test_npz(npz: str, tmp_path: Path) -> None:
    check_program(small(npz), (8, 8, 3), 36, 4)
    check_program(small(npz, size=6, held_out_share=0.5), (6, 6, 3), 20, 20)
    np.savez(tmp_path / "grey.npz", images=IMAGES[..., 0] / np.float32(255), labels=LABELS.astype(np.uint8))
    check_program(small(str(tmp_path / "grey.npz")), (8, 8, 1), 36, 4)


def test_images_are_held_out_of_those_to_train_on_where_a_share_is_given(tmp_path: Path) -> None:
    """Then those to test on are left for the end."""
    check_program(image_classifier(mnist(tmp_path, False), "idx", "mlp", held_out_share=0.25), (8, 8, 1), 9, 3)


def test_a_home_s_path_is_understood(npz: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = npz.rsplit("/", 1)
    monkeypatch.setenv("HOME", folder)
    assert len(small(f"~/{name}").dataset) == 36


# Models.

TINY: dict[str, dict[str, Any]] = {
    "resnet18": {"options": {"small_images": True}},
    "resnet34": {"options": {"small_images": True}},
    "resnet50": {"options": {"small_images": True}},
    "mobilenet_v2": {"options": {"width": 0.35, "stem_strides": 1}},
}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_a_step(npz: str, model: str) -> None:
    program = small(npz, model, **TINY.get(model, {}))
    step = check_step(program, check_begin(program))
    assert np.isfinite(step.loss)
    assert 0 <= float(step.metrics["accuracy"]) <= 1
    assert all(np.isfinite(gradient).all() for gradient in step.gradients.values())


def test_options_are_the_model_s(npz: str) -> None:
    assert check_begin(small(npz, options={"hidden": [5]}))["head/kernel"].shape == (5, 4)


# Settings that make no sense.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "tar"}, "format is 'tar'; choose from idx, cifar10, folder, npz"),
        ({"model": "vgg"}, "model is 'vgg'; choose from mlp, .*mobilenet_v2"),
        ({"augment": ["flip", "turn"]}, "augment is 'turn'; choose from flip, crop"),
        ({"augment": "turn"}, "augment is 'turn'"),
        ({"options": {"width": 2}}, "options have 'width', which mlp does not have; its options are hidden, dropout"),
        ({"options": "hidden"}, "options is 'hidden'; give a mapping of names to anything"),
        ({"options": {"hidden": 16}}, "hidden is 16; give a list of integers"),
        ({"options": {"dropout": "a"}}, "dropout is 'a'; give a number"),
        ({"model": "mobilenet_v2", "options": {"stem_strides": [1, 1]}}, r"stem_strides is \[1, 1\]; give an integer"),
        ({"model": "resnet18", "options": {"small_images": 1}}, "small_images is 1; give true or false"),
        ({"size": "32"}, "size is '32'; give an integer"),
        ({"classes": "10"}, "classes is '10'; give an integer"),
        ({"top": True}, "top is True; give an integer"),
        ({"mean": ["0.5"]}, r"mean is \['0.5'\]; give a number, or a list of numbers"),
        ({"held_out_share": "half"}, "held_out_share is 'half'; give a number$"),
        ({"precision": 32}, "precision is 32; give a string"),
        (
            {"model": "resnet18", "options": {"classes": 2}},
            "options have 'classes', which resnet18 .* are small_images",
        ),
        ({"classes": 1}, "classes is 1; give 2 or more"),
        ({"top": 5}, "top is 5; give a number from 1 to the number of classes, 4"),
        ({"top": 0}, "top is 0"),
        ({"format": "folder"}, "needs a size"),
    ],
)
def test_unknown_settings_are_refused(npz: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ProgramError, match=said):
        image_classifier(**{"data": npz, "format": "npz", "model": "mlp", "classes": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"precision": "float8"}, errors.InvalidLayer, "computes in one of float64, .* not 'float8'"),
        ({"options": {"dropout": 2}}, errors.InvalidLayer, "Dropout"),
        ({"head": "hidden0"}, errors.InvalidLayer, "'hidden0' cannot replace the last part"),
        (
            {"train_from": "body"},
            errors.InvalidLayer,
            "the model has no part 'body'; choose from flatten, hidden0, relu0, head",
        ),
        ({"mean": [0.5, 0.5]}, errors.InvalidData, "give a number, or one for each of 3 channels"),
        ({"held_out_share": 0}, errors.InvalidData, "a share of 0 of 40 samples"),
        ({"data": "none.npz"}, errors.InvalidData, "none.npz does not exist"),
        ({"model": "small_cnn", "size": 1}, errors.InvalidShape, "layer 'pool1'"),
    ],
)
def test_invalid_values_are_refused(
    npz: str, settings: dict[str, Any], error: type[shoal.ShoalError], said: str
) -> None:
    with pytest.raises(error, match=said):
        image_classifier(**{"data": npz, "format": "npz", "model": "mlp", "classes": 4, **settings})


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": IMAGES, "labels": LABELS}, "must have the arrays images and labels, but has x, labels; write it with"),
        ({"images": IMAGES.reshape(40, -1), "labels": LABELS}, r"images in .*\[n, 192\]; give \[n, height, width"),
        ({"images": IMAGES.astype(int), "labels": LABELS}, "images are int64; give uint8 or floats"),
        ({"images": IMAGES.astype(float), "labels": LABELS}, "images in .* float64 up to .*; divide them by 255, or"),
        ({"images": np.full((4, 8, 8), np.nan), "labels": LABELS[:4]}, "up to nan"),
    ],
)
def test_npz_files_with_other_arrays_are_refused(tmp_path: Path, arrays: Mapping[str, Any], said: str) -> None:
    np.savez(tmp_path / "file.npz", **arrays)
    with pytest.raises(errors.InvalidData, match=said):
        small(str(tmp_path / "file.npz"))


def test_floats_above_1_after_a_black_image_are_refused_when_they_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "file.npz", images=np.arange(40.0)[:, None, None] * np.ones((1, 8, 8)), labels=LABELS)
    program = small(str(tmp_path / "file.npz"))
    with pytest.raises(errors.InvalidData, match=r"up to .*divide them by 255"):
        program.dataset.batch(np.arange(36), seed=0)


def test_an_array_that_is_no_npz_file(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES)
    with pytest.raises(
        errors.InvalidData, match="must have the arrays images and labels, but has one array without a name"
    ):
        small(str(tmp_path / "images.npy"))


def test_folders_of_other_classes(tmp_path: Path) -> None:
    path = pictures(tmp_path, "train", ("ant", "bee", "cat"))
    with pytest.raises(errors.ProgramError, match=r"has 3 classes, but the model has 10; set classes=3"):
        image_classifier(path, "folder", "mlp", size=8)
    pictures(tmp_path, "test", ("ant", "cat"))
    with pytest.raises(errors.InvalidData, match="the class 'bee' is in only one of train and test in"):
        image_classifier(path, "folder", "mlp", 3, size=8)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            LABELS + 9,
            "the label 12 is not one of the model's 4 classes, 0 to 3; give the model more classes, or correct",
        ),
        (LABELS - 1, "the label -1 is not one"),
        (LABELS / 2, "labels are float64 of shape .*; give the class number of each sample"),
        (np.eye(4, dtype=int)[LABELS], r"labels are int64 of shape \(40, 4\)"),
    ],
)
def test_labels_without_a_class_are_refused_when_they_are_read(tmp_path: Path, labels: np.ndarray, said: str) -> None:
    np.savez(tmp_path / "file.npz", images=IMAGES, labels=labels)
    program = small(str(tmp_path / "file.npz"), held_out_share=0.5)
    for part, how in ((program.dataset, {"seed": 0}), (program.held_out, {})):
        with pytest.raises(errors.InvalidData, match=said.replace("40", "20")):
            part.batch(np.arange(20), **how)


# Augmentation.


def test_images_to_train_on_change_by_the_epoch_and_those_held_out_do_not(npz: str) -> None:
    program = small(npz, augment="flip, crop", mean=[0.1, 0.2, 0.3], std=0.5)
    numbers = np.arange(36)
    one, again, other = (program.dataset.batch(numbers, seed=seed)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    part, _ = program.dataset.batch(numbers[5:9], seed=1)
    np.testing.assert_array_equal(part, one[5:9])
    plain = small(npz, mean=[0.1, 0.2, 0.3], std=0.5)
    held_out, labels = program.held_out.batch(np.arange(4))
    np.testing.assert_array_equal(held_out, plain.held_out.batch(np.arange(4))[0])
    pixels = {
        (image.tobytes(), label)
        for image, label in zip(((IMAGES / np.float32(255) - [0.1, 0.2, 0.3]) / 0.5).round(3), LABELS, strict=True)
    }
    assert {
        (image.astype(float).round(3).tobytes(), label) for image, label in zip(held_out, labels, strict=True)
    } <= pixels


# Fine-tuning.


def test_frozen_variables_keep_the_names_that_a_partial_restore_matches(npz: str) -> None:
    settings: dict[str, Any] = {"model": "mobilenet_v2", "options": {"width": 0.35}}
    whole = small(npz, **settings).variables()
    program = small(npz, **settings, head="digits", train_from="digits")
    tuned = program.variables()
    assert tuned.keys() - whole.keys() == {"digits/kernel", "digits/bias"}
    assert whole.keys() - tuned.keys() == {"head/kernel", "head/bias"}
    assert all(
        (tuned[name].shape, tuned[name].dtype) == (whole[name].shape, whole[name].dtype)
        for name in tuned.keys() & whole.keys()
    )
    assert {name for name in tuned if tuned[name].trainable} == {"digits/kernel", "digits/bias"}
    assert not check_step(program, check_begin(program)).updates
    assert small(npz, **settings, head="digits").variables().keys() == tuned.keys()


# Precision.


def apart(found: np.ndarray, wanted: np.ndarray) -> np.float32:
    """By their lengths: where ReLU or a maximum is decided the other way, single numbers differ wholly."""
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("precision", "near"), [("float64", 1e-5), ("bfloat16", 0.2), ("float16", 0.05)])
def test_other_precisions_are_close_to_float32(npz: str, precision: str, near: float) -> None:
    plain, other = (
        small(npz, "small_cnn", options={"dropout": 0}),
        small(npz, "small_cnn", options={"dropout": 0}, precision=precision),
    )
    values = check_begin(plain)
    wanted, found = check_step(plain, values), check_step(other, values)
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=near)
    for name, gradient in wanted.gradients.items():
        assert apart(found.gradients[name], gradient) <= near
    assert shoal.evaluate(other, values).keys() == {"loss", "accuracy"}


@pytest.mark.parametrize(("precision", "one_by_one"), [("float32", True), ("float16", False)])
def test_on_a_gpu_gradients_come_one_by_one(
    npz: str, monkeypatch: pytest.MonkeyPatch, precision: str, one_by_one: bool
) -> None:
    program = small(npz, precision=precision)
    values, batch = check_begin(program), program.dataset.batch(np.arange(8), seed=7)
    wanted = program.loss_and_gradients(values, batch, seed=3)
    monkeypatch.setattr(supervised, "namespace_of", lambda _: "cupy")
    found = program.loss_and_gradients(values, batch, seed=3)
    assert isinstance(found.gradients, dict) is not one_by_one
    expected = dict(wanted.gradients)
    for name, gradient in dict(found.gradients).items():
        np.testing.assert_array_equal(gradient, expected[name])
    assert dict(found.updates).keys() == dict(wanted.updates).keys()


def test_float16_skips_overflowing_steps_until_the_scale_fits(npz: str) -> None:
    program = small(npz, precision="float16")
    values = check_begin(program)
    values["head/kernel"] = values["head/kernel"] * 1000  # so large that 2^15 of what goes back through it overflow
    steps = [check_step(program, values) for _ in range(12)]
    refused = [not all(np.isfinite(it).all() for it in step.gradients.values()) for step in steps]
    assert refused == sorted(refused, reverse=True), "once a scale does, it stays"
    assert 0 < sum(refused) <= 10, "more in a row a job does not bear"
    assert all(np.isfinite(step.loss) for step in steps)
    wanted = check_step(small(npz), values).gradients
    for name, gradient in wanted.items():
        assert apart(steps[-1].gradients[name], gradient) <= 0.1


# What it learns, and is judged by.


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_it_learns(tmp_path: Path, precision: str) -> None:
    program = small(bright(tmp_path / "bright.npz"), "mlp", classes=2, augment=["flip"], precision=precision)
    before = shoal.evaluate(program, check_begin(program))
    after = shoal.evaluate(program, trained(program, 60, 0.02))
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > 0.9 > before["accuracy"]


def test_metrics_cover_the_whole_set_for_any_batch_size(npz: str) -> None:
    program = small(npz, held_out_share=0.5, top=3)
    values = check_begin(program)
    x, labels = program.held_out.batch(np.arange(20))
    logits, _, _ = program.net.apply(values, values, x, False)
    order = np.argsort(-logits, axis=1)
    chance = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = {
        "loss": -np.log(chance[np.arange(20), labels]).mean(),
        "accuracy": (order[:, 0] == labels).mean(),
        "top3": (order[:, :3] == labels[:, None]).any(axis=1).mean(),
    }
    for batch_size in (20, 7):
        assert shoal.evaluate(program, values, batch_size=batch_size) == pytest.approx(wanted, rel=1e-4)


# Of any layer.


class Drawn:
    """A data set that wants a seed, and is not to be read ahead."""

    prefetch = 0

    def __len__(self) -> int:
        return 6

    def batch(self, indices: np.ndarray, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((len(indices), 2), seed, np.float32), np.zeros(len(indices), int)


def test_a_data_set_is_read_as_it_says_itself() -> None:
    net = Sequential({"head": Dense(2)})
    drawn: Any = Drawn()  # the protocol has no seed: it is passed to data sets whose `batch` takes one
    program = Supervised(net, (2,), drawn, drawn, MulticlassClassification())
    assert program.dataset.prefetch == 0
    assert not isinstance(program.dataset, BlockDataset)
    x, _ = program.dataset.batch(np.arange(3), seed=5)
    assert (x == 5).all()
    with pytest.raises(errors.InvalidShape, match="Dense"):
        Supervised(net, (), drawn, drawn, MulticlassClassification())


def test_a_model_that_is_fed_bytes_says_so_instead_of_computing_in_them() -> None:
    data = Arrays((IMAGES, LABELS))
    program = Supervised(mlp(4), (8, 8, 3), data, data, MulticlassClassification())
    values, batch = check_begin(program), program.dataset.batch(np.arange(4))
    for use in (lambda: program.loss_and_gradients(values, batch, seed=0), lambda: program.evaluate(values, batch)):
        with pytest.raises(errors.InvalidShape, match=r"needs floats, not uint8 .*augment\.ToFloat"):
            use()


def test_yes_or_no_is_judged_alike_by_columns_and_by_the_rule_of_its_loss() -> None:
    outputs, labels = np.array([[2.0], [-1.0], [0.5]]), np.array([1, 0, 0])
    metrics = BinaryClassification().metrics(outputs, labels)
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert isinstance(metrics["auc"], AreaUnderCurve)
    assert metrics["loss"] == pytest.approx(np.log1p(np.exp([-2.0, -1.0, 0.5])).mean())

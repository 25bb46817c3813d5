"""Published weights: their names and layouts, what the models return with them, the file formats, and wrong files."""

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal import errors
from shoal_nn import Dense
from shoal_nn.containers import Sequential
from shoal_nn.models import frozen, load_weights, mlp, mobilenet_v2, pretrained, resnet, with_head
from shoal_nn.models.weights.files import read_arrays
from shoal_nn.models.weights.naming import namings
from shoal_nn.programs import image_classifier
from support.devices.golden_layers import drawn
from support.published_weights import CLASSES, IMAGES, WIDTH, published_value

FOLDER = Path(__file__).parents[2] / "golden"
GOLDEN = json.loads((FOLDER / "weights.json").read_text())
NARROW = {
    "torchvision": mobilenet_v2(CLASSES, WIDTH),
    "keras": mobilenet_v2(CLASSES, WIDTH, style="keras"),
}
MODELS: dict[tuple[str, str], Sequential] = {
    ("torchvision", "resnet18"): resnet(18),
    ("torchvision", "resnet34"): resnet(34),
    ("torchvision", "resnet50"): resnet(50),
    ("torchvision", "mobilenet_v2"): mobilenet_v2(),
    ("torchvision", "narrow"): NARROW["torchvision"],
    ("keras", "resnet50"): resnet(50, style="keras"),
    ("keras", "mobilenet_v2"): mobilenet_v2(style="keras"),
    ("keras", "narrow"): NARROW["keras"],
}


def shapes(publisher: str, model: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in GOLDEN["names"][publisher][model].items()}


@cache
def published(publisher: str) -> dict[str, np.ndarray]:
    """The arrays of a published file of the narrow MobileNetV2."""
    return {name: published_value(publisher, name, shape) for name, shape in shapes(publisher, "narrow").items()}


def write_npz(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    by_name: dict[str, Any] = dict(arrays)
    np.savez(folder / "weights.npz", **by_name)
    return folder / "weights.npz"


def write_old_keras(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """As Keras publishes: a group for each layer, in it the layer's name again."""
    with h5py.File(folder / "weights.h5", "w") as file:
        for name, array in arrays.items():
            layer, _, weight = name.partition("/")
            if "depthwise" in layer:
                weight = weight.replace("kernel", "depthwise_kernel")
            file[f"{layer}/{layer}/{weight}:0"] = array
    return folder / "weights.h5"


def write_new_keras(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """As `save_weights` of Keras 3 does: layers and weights are numbered, and an attribute has the layer's name."""
    with h5py.File(folder / "new.weights.h5", "w") as file:
        layers: dict[str, Any] = {}
        for name, array in arrays.items():
            layer = name.partition("/")[0]
            if layer not in layers:
                layers[layer] = file.create_group(f"layers/any_{len(layers)}/vars")
                layers[layer].attrs["name"] = layer
            layers[layer][str(len(layers[layer]))] = array
    return folder / "new.weights.h5"


def write_safetensors(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    save_file(dict(arrays), folder / "weights.safetensors")
    return folder / "weights.safetensors"


# Names and layouts.


@pytest.mark.parametrize(("publisher", "model"), MODELS)
def test_each_published_array_has_a_place(publisher: str, model: str) -> None:
    net, theirs = MODELS[publisher, model], shapes(publisher, model)
    variables = net.variables((224, 224, 3))
    [naming] = [each for each in namings(variables, net.layers[-1][0]) if each.publisher == publisher]
    used = []
    for name, variable in variables.items():
        source = naming.source(name)
        found = source.find(theirs)
        assert found is not None, name
        assert source.layout(np.broadcast_to(np.float32(0), theirs[found])).shape == variable.shape, name
        used += [found, *(bias for bias in source.minus if bias in theirs)]
    assert len({*used}) == len(used)
    assert {name for name in theirs if not name.endswith("num_batches_tracked")} == {*used}


@pytest.mark.parametrize("publisher", NARROW)
def test_model_returns_what_the_original_returns(tmp_path: Path, publisher: str) -> None:
    net = NARROW[publisher]
    values = load_weights(net, write_npz(tmp_path, published(publisher)))
    images = drawn("published images", IMAGES).astype(np.float32)
    outputs, _, _ = net.apply(values, values, images, False)
    expected = np.array(GOLDEN["outputs"][publisher])
    assert np.abs(outputs - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("write", [write_old_keras, write_new_keras, write_safetensors])
def test_formats_of_keras_give_the_same_values(
    tmp_path: Path, write: Callable[[Path, Mapping[str, np.ndarray]], Path]
) -> None:
    arrays = published("keras")
    expected = load_weights(NARROW["keras"], write_npz(tmp_path, arrays))
    found = load_weights(NARROW["keras"], write(tmp_path, arrays))
    assert found.keys() == expected.keys() == NARROW["keras"].variables(IMAGES[1:]).keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
        assert value.dtype == np.float32


def test_bias_before_a_normalization_moves_into_its_mean() -> None:
    net = MODELS["keras", "resnet50"]
    naming = namings(net.variables((224, 224, 3)), "fc")[2]
    source = naming.source("layer2/0/sum/shortcut/bn/mean")
    assert (source.names[0], source.minus[0]) == ("conv3_block1_0_bn/moving_mean", "conv3_block1_0_conv/bias")


def test_values_of_a_trained_model_are_loaded_by_their_own_names(tmp_path: Path) -> None:
    net = mlp(3, (4,))
    params, _ = net.init(np.random.default_rng(0), (5,))
    path = write_npz(tmp_path, params)
    found = load_weights(net, path, shape=(5,))
    assert all((found[name] == params[name]).all() for name in params)
    tuned = with_head(net, Dense(7), "new_head")
    assert load_weights(tuned, path, shape=(5,), head=False).keys() == {"hidden0/kernel", "hidden0/bias"}


# First values of variables.


def test_pretrained_variables_start_with_the_values(tmp_path: Path) -> None:
    path = write_npz(tmp_path, published("torchvision"))
    net = frozen(with_head(NARROW["torchvision"], Dense(4), "new"), until="last")
    plain, found = net.variables(IMAGES[1:]), pretrained(net, path, IMAGES[1:], head=False)
    assert list(found) == list(plain)
    values = load_weights(NARROW["torchvision"], path)
    for name, variable in found.items():
        like = plain[name]
        assert (variable.shape, variable.trainable, variable.aggregation) == (
            like.shape,
            like.trainable,
            like.aggregation,
        )
        assert (variable.values is None) == name.startswith("new/"), name
        assert variable.values is None or (variable.values == values[name]).all()


@pytest.mark.parametrize("head", ["", "new"])
def test_program_starts_from_published_weights(tmp_path: Path, head: str) -> None:
    path = write_npz(tmp_path, published("torchvision"))
    images, data = np.zeros((4, 32, 32, 3), np.uint8), tmp_path / "images.npz"
    np.savez(data, images=images, labels=np.arange(4))
    settings: dict[str, Any] = {"options": {"width": WIDTH}, "weights": str(path), "head": head, "held_out_share": 0.5}
    program = image_classifier(str(data), "npz", "mobilenet_v2", CLASSES, **settings)
    drawn_names = {name for name, variable in program.variables().items() if variable.values is None}
    assert drawn_names == ({"new/kernel", "new/bias"} if head else set())


# Files of torch.save.


@pytest.mark.parametrize("name", ["zip.pth", "stream.pth"])
def test_state_dict_is_read_without_torch(name: str) -> None:
    found = read_arrays(FOLDER / "weights" / name)
    assert list(found) == list(GOLDEN["tensors"])
    for key, expected in GOLDEN["tensors"].items():
        np.testing.assert_array_equal(found[key].astype(np.float64), np.array(expected).reshape(found[key].shape))
    dtypes = {
        key: found[key].dtype.name for key in ("conv.weight", "half", "bfloat16", "double", "num_batches_tracked")
    }
    assert list(dtypes.values()) == ["float32", "float16", "bfloat16", "float64", "int64"]
    assert found["empty"].shape == (0, 3)


def repacked(change: Callable[[str, bytes], bytes | None]) -> bytes:
    """The archive with changed members; None leaves one out."""
    out = io.BytesIO()
    with zipfile.ZipFile(FOLDER / "weights" / "zip.pth") as archive, zipfile.ZipFile(out, "w") as other:
        for name in archive.namelist():
            if (content := change(name, archive.read(name))) is not None:
                other.writestr(name, content)
    return out.getvalue()


def with_instructions(instructions: bytes) -> bytes:
    return repacked(lambda name, content: instructions if name.endswith("data.pkl") else content)


def pushed(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            with_instructions(b"\x80\x02cos\nsystem\n" + pushed("true") + b"\x85R."),
            "it calls 'os system' in a way that no",
        ),
        (with_instructions(b"\x80\x02cos\nsystem\n)\x81."), "it has the instruction NEWOBJ, which no state dict needs"),
        (
            with_instructions(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."),
            "it calls 'torch._utils _rebuild_tensor_v2'",
        ),
        (with_instructions(b"\x80\x02]."), "it has a list, not a state dict; save model.state_dict"),
        (with_instructions(b"\x80\x02}" + pushed("epoch") + b"K\x03s."), "'epoch' is a int, not a tensor"),
        (with_instructions(b"\x80\x02}t."), "its instructions do not fit together"),
        (with_instructions(b"\x80\x02}"), "cannot be read"),
        (with_instructions(b""), "cannot be read"),
        (
            repacked(lambda name, content: content[:-1] if name.endswith("/data/0") else content),
            "the storage '0' of 48 bytes",
        ),
        (
            repacked(lambda name, content: None if name.endswith("/data/0") else content),
            "the storage '0' of 48 bytes is missing",
        ),
        ((FOLDER / "weights" / "stream.pth").read_bytes()[:-9], "is cut short"),
        (b"\x80\x02K\x01.", "it is not a file of torch.save"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "cannot be read"),
        (b"PK\x03\x04" + bytes(40), "cannot be read"),
        (b"nonsense", "is not a safetensors file"),
        (b"", "weights"),
    ],
)
def test_damaged_and_hostile_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(errors.InvalidData, match=says):
        read_arrays(tmp_path / "weights")


def test_tensor_outside_of_its_storage_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(FOLDER / "weights" / "zip.pth") as archive:
        instructions = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    whole = b"K\x02K\x01K\x02K\x03t"  # the shape of conv.weight
    assert instructions.count(whole) == 1
    (tmp_path / "weights").write_bytes(with_instructions(instructions.replace(whole, b"K\x02K\x01K\x02K\x04t")))
    with pytest.raises(
        errors.InvalidData, match=r"a tensor of shape \(2, 1, 2, 4\) is outside of its storage of 12 numbers"
    ):
        read_arrays(tmp_path / "weights")


# Files that do not fit the model.


def test_missing_file_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        errors.InvalidData, match=f"no file of weights at {tmp_path}/none.pth; download it from its publisher"
    ):
        load_weights(mobilenet_v2(), tmp_path / "none.pth")


def test_weights_of_the_other_library_are_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path, published("keras"))
    with pytest.raises(errors.InvalidLayer, match=r'weights of keras, but .* build it with style="keras"'):
        load_weights(NARROW["torchvision"], path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    arrays = published("torchvision")
    net = NARROW["torchvision"]
    with pytest.raises(errors.InvalidData, match=r"has classifier.1.weight for head/kernel in the shape \(1280, 10\)"):
        load_weights(mobilenet_v2(3, WIDTH), write_npz(tmp_path, arrays))
    with pytest.raises(
        errors.InvalidData, match=r"lacks \d+ of the 102 arrays of the model, such as \S+ for conv1/kernel"
    ):
        load_weights(resnet(18), write_npz(tmp_path, arrays))
    more = {**arrays, "features.19.0.weight": arrays["features.0.0.weight"]}
    with pytest.raises(
        errors.InvalidData, match=r"has 1 arrays that the model does not use, such as features.19.0.weight"
    ):
        load_weights(net, write_npz(tmp_path, more))
    headless = write_npz(tmp_path, {name: array for name, array in arrays.items() if "classifier" not in name})
    with pytest.raises(
        errors.InvalidData, match=r"no weights for the last part of the model \(classifier.1.weight\); give"
    ):
        load_weights(net, headless)
    assert len(load_weights(net, headless, head=False)) == len(net.variables(IMAGES[1:])) - 2


def test_unknown_styles_are_refused() -> None:
    build: Any = mobilenet_v2
    with pytest.raises(errors.InvalidLayer, match="there is no style 'jax'; choose torchvision or keras"):
        build(style="jax")

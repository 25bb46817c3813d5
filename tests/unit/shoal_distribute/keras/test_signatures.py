"""Arguments of the Keras-shaped front compared with those of Keras from `tests/golden/make_keras.py`."""

import inspect
import json
import operator
from pathlib import Path
from typing import Any

import pytest

from shoal import errors
from shoal_distribute import keras
from shoal_distribute.keras.names import known_arguments, refused_arguments
from support.keras_front import cases

ROOT = Path(__file__).parents[4]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "keras.json").read_text())["signatures"]
DOCS = (ROOT / "docs" / "how-to" / "keras.md").read_text()
# Arguments of all layers, whose defaults Keras has elsewhere.
BASE = {"name", "trainable", "dtype", "input_shape", "activity_regularizer"}
# Its argument is an optimizer of shoal.optim.
OWN = {"optimizers.Optimizer"}
CLASSES = {
    key: it
    for key in GOLDEN
    if key.rpartition(".")[0] in cases.SIGNATURES and key not in OWN
    if inspect.isclass(it := getattr(operator.attrgetter(key.rpartition(".")[0])(keras), key.rpartition(".")[2], None))
}


def plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def check_arguments(function: Any, theirs: list[list[Any]], taken: set[str]) -> None:
    """Asserts that a function takes the arguments of Keras in their order, and no others."""
    parameters = [it for it in inspect.signature(function).parameters.values() if it.name != "self"]
    ours = [it for it in parameters if it.kind in {it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY}]
    defaults: dict[str, Any] = {name: rest[0] if rest else inspect.Parameter.empty for name, *rest in theirs}
    by_place = [it.name for it in ours if it.kind is it.POSITIONAL_OR_KEYWORD]
    assert by_place == list(defaults)[: len(by_place)]
    assert set(defaults) <= taken | {it.name for it in ours}
    for parameter in ours:
        if parameter.name not in BASE and parameter.default is not inspect.Parameter.empty:
            assert plain(parameter.default) == plain(defaults[parameter.name]), parameter.name


@pytest.mark.parametrize("key", CLASSES)
def test_classes_take_the_arguments_of_keras(key: str) -> None:
    made = CLASSES[key]
    known, refused = known_arguments(made), refused_arguments(made)
    check_arguments(made.__init__, GOLDEN[key], {*known, *refused})
    theirs = dict(it for it in GOLDEN[key] if len(it) == 2)
    for name, (default, _) in refused.items():
        assert default == theirs.get(name, default)
        assert name in known or f"`{name}`" in DOCS, f"docs/how-to/keras.md does not name {name}"


@pytest.mark.parametrize("key", [f"{owner}.{name}" for owner, names in cases.METHODS.items() for name in names])
def test_methods_take_the_arguments_of_keras(key: str) -> None:
    owner, _, name = key.partition(".")
    made = keras.layers.Layer if owner == "Layer" else getattr(keras, owner)
    check_arguments(getattr(made, name), GOLDEN[key], set())


def test_refused_arguments_accept_the_default_alone() -> None:
    assert keras.layers.Embedding(3, 2, mask_zero=False, weights=None).name
    with pytest.raises(errors.BadRequest, match=r"Embedding\(mask_zero=True\) is not supported: layers know no masks"):
        keras.layers.Embedding(3, 2, mask_zero=True)
    with pytest.raises(errors.BadRequest, match=r"Adam\(use_ema=True\) is not supported"):
        keras.optimizers.Adam(use_ema=True)  # type: ignore[call-arg] # the constructor refuses it
    with pytest.raises(TypeError, match="did you mean 'mask_zero'"):
        keras.layers.Embedding(3, 2, maskzero=True)

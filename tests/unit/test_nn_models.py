"""Models: their published sizes, what they give for an image, and gradients for all that they train."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal_nn import Training, softmax_cross_entropy
from shoal_nn.models import mlp, mobilenet_v2, resnet, small_cnn

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
# Parameters that are trained, as torchvision and the papers give them.
PUBLISHED = [
    (resnet(18), 224, 11_689_512),
    (resnet(34), 224, 21_797_672),
    (resnet(50), 224, 25_557_032),
    (mobilenet_v2(), 224, 3_504_872),
]
SMALL = {
    "mlp": (mlp(10, (32, 16), dropout=0.1), (28, 28, 1)),
    "cnn": (small_cnn(10), (28, 28, 1)),
    "resnet18": (resnet(18, 10, small_images=True), (8, 8, 3)),
    "resnet50": (resnet(50, 10, small_images=True), (8, 8, 3)),
    "mobilenet": (mobilenet_v2(10, 0.35, stem_strides=1), (32, 32, 3)),
}


@pytest.mark.parametrize(("model", "size", "parameters"), PUBLISHED)
def test_models_have_as_many_parameters_as_were_published(model, size, parameters):
    variables = model.variables((size, size, 3))
    assert sum(math.prod(it.shape) for it in variables.values() if it.trainable) == parameters
    assert model.output_shape((size, size, 3)) == (1000,)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_has_a_gradient_for_each_parameter_and_moves_each_statistic(name):
    model, shape = SMALL[name]
    params, state = model.init(np.random.default_rng(1), shape)
    x = np.random.default_rng(2).normal(size=(4, *shape)).astype(np.float32)
    logits, moved, pullback = model.apply(params, state, x, Training(3))
    loss, by_logits = softmax_cross_entropy(logits, np.arange(4))
    gradients, _ = pullback(by_logits)
    assert np.isfinite(loss)
    assert {key: (it.shape, it.dtype) for key, it in gradients.items()} == {
        key: (it.shape, it.dtype) for key, it in params.items()
    }
    assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())
    assert moved.keys() == state.keys()
    assert all((moved[key] != state[key]).any() for key in state)
    evaluated, unmoved, _ = model.apply(params, moved, x, False)
    assert evaluated.shape == (4, 10)
    assert all((unmoved[key] == moved[key]).all() for key in moved)


def test_the_program_of_the_docs_learns():
    found = re.search(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(found[1], names)
    program = names["Shapes"](images=256)
    assert isinstance(program, shoal.program.RandomProgram)
    params, state = program.net.init(np.random.default_rng(0), (8, 8, 1))
    assert program.variables().keys() == params.keys() | state.keys()
    accuracy = []
    for step in range(40):
        given = program.loss_and_gradients({**params, **state}, program.batch(np.arange(256)), seed=step)
        params = {name: value - 0.1 * given.gradients[name] for name, value in params.items()}
        state = dict(given.updates)
        accuracy.append(given.metrics["accuracy"])
    assert accuracy[0] < 0.8
    assert accuracy[-1] > 0.9


def test_the_docs_have_the_counts():
    for _, _, parameters in PUBLISHED:
        assert f"{parameters:,}" in DOCS.read_text()


def test_a_head_is_the_only_part_that_depends_on_the_classes():
    few, many = (mobilenet_v2(classes, 0.35).variables((32, 32, 3)) for classes in (10, 100))
    assert {name for name in few if few[name] != many[name]} == {"head/kernel", "head/bias"}


@pytest.mark.parametrize("wrong", [lambda: resnet(19), lambda: mobilenet_v2(width=0), lambda: mlp(0)])
def test_models_that_there_are_not(wrong):
    with pytest.raises(shoal.InvalidLayer):
        wrong()

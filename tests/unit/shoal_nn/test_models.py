"""Models: their published numbers of parameters, their outputs, and gradients for all trainable variables."""

import inspect
import math
import re
import shlex
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal._cli import options
from shoal._cli.submit import submit
from shoal_nn import (
    AreaUnderCurve,
    Dense,
    Frozen,
    Parallel,
    TrainingContext,
    programs,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
)
from shoal_nn.containers import Sequential
from shoal_nn.models import frozen, mlp, mobilenet_v2, resnet, small_cnn, wide_deep, with_head
from shoal_nn.programs import image_classifier, wide_and_deep
from shoal_worker.programs import load_program

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "models.md"
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
def test_models_have_as_many_parameters_as_were_published(model: Sequential, size: int, parameters: int) -> None:
    variables = model.variables((size, size, 3))
    assert sum(math.prod(it.shape) for it in variables.values() if it.trainable) == parameters
    assert model.output_shape((size, size, 3)) == (1000,)


@pytest.mark.parametrize("name", SMALL)
def test_a_step_has_a_gradient_for_each_parameter_and_moves_each_statistic(name: str) -> None:
    model, shape = SMALL[name]
    params, state = model.init(np.random.default_rng(1), shape)
    x = np.random.default_rng(2).normal(size=(4, *shape)).astype(np.float32)
    logits, moved, pullback = model.apply(params, state, x, TrainingContext(3))
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


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """What the docs' programs define, one after the other."""
    names: dict[str, Any] = {}
    for program in re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL):
        exec(program, names)
    return names


def check_training(
    program: Any, values: Mapping[str, np.ndarray], steps: int
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Takes some steps; returns the values after them, and the accuracy at each."""
    variables, accuracy, values = program.variables(), [], dict(values)
    assert variables.keys() == values.keys()
    for step in range(steps):
        given = program.loss_and_gradients(values, program.batch(np.arange(256)), seed=step)
        assert given.gradients.keys() == {name for name, it in variables.items() if it.trainable}
        moved = {name: values[name] - 0.1 * gradient for name, gradient in given.gradients.items()}
        values |= {**moved, **given.updates}
        accuracy.append(given.metrics["accuracy"])
    return values, accuracy


def begun(net: Sequential, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    params, state = net.init(np.random.default_rng(0), shape)
    return {**params, **state}


def test_the_program_of_the_docs_learns(documented: dict[str, Any]) -> None:
    shapes = documented["Shapes"](images=256)
    assert isinstance(shapes, shoal.program.RandomProgram)
    _, accuracy = check_training(shapes, begun(documented["Shapes"](images=256).net, (8, 8, 1)), 40)
    assert accuracy[0] < 0.8
    assert accuracy[-1] > 0.9


def test_the_fine_tuning_of_the_docs_learns(documented: dict[str, Any]) -> None:
    whole = documented["Shapes"](images=256)
    learned, _ = check_training(whole, begun(whole.net, (8, 8, 1)), 40)
    head, everything = (documented["FineTuned"](256, head_only=only) for only in (True, False))
    beginning = begun(head.net, (8, 8, 1))
    restored = {name: learned.get(name, value) for name, value in beginning.items()}
    tuned, accuracy = check_training(head, restored, 20)
    assert accuracy[-1] > 0.9
    assert {name for name in tuned if (tuned[name] != restored[name]).any()} == {"new_head/kernel", "new_head/bias"}
    further, accuracy = check_training(everything, tuned, 10)
    assert accuracy[-1] > 0.9
    assert all((further[name] != tuned[name]).any() for name in tuned)


DATA = {"format": "npz", "held_out_share": 0.25}


def test_the_jobs_of_the_docs_fine_tune_a_model(documented: dict[str, Any], tmp_path: Path) -> None:
    whole, head_only, everything = (documented[name] for name in ("whole", "head_only", "everything"))
    for name, classes, job in (("a", 10, whole), ("b", 37, head_only), ("b", 37, everything)):
        path = tmp_path / f"{name}.npz"
        np.savez(path, images=np.zeros((8, 32, 32, 3), np.uint8), labels=np.arange(8) + classes - 8)
        program = load_program(job.program, {**job.settings, **DATA, "data": str(path)})
        assert isinstance(program, shoal.program.EvaluatedProgram)
        variables: Mapping[str, Any] = program.variables()
        kept = {name for name, it in variables.items() if not it.trainable and "/bn/" not in name}
        assert bool(kept) == (job is head_only)
        assert job.partial_restore == (job is not whole)
    assert (head_only.restore, everything.restore) == (f"{whole.name}/best", f"{head_only.name}/best")


@pytest.mark.parametrize("factory", [image_classifier, wide_and_deep])
def test_the_docs_have_every_setting_of_a_program(factory: Callable[..., Any]) -> None:
    text = DOCS.read_text()
    [_, table, *_] = text.split(f"| of `{factory.__name__}` |")
    rows = re.findall(r"^\| (`.*?`) \|", table.split("\n\n")[0], re.MULTILINE)
    assert re.findall("`([a-z_]+)`", " ".join(rows)) == [*inspect.signature(factory).parameters]


def test_the_docs_command_lines_fit_the_programs() -> None:
    lines = re.findall(r"^shoal (submit shoal_nn\.programs:.*?[^\\])$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.replace("\\\n", " "))
        _, name = words[1].split(":")
        settings = options.settings([value for flag, value in pairwise(words) if flag == "--set"])
        inspect.signature(getattr(programs, name)).bind(**settings)
        known = {f"--{flag.replace('_', '-')}" for flag in inspect.signature(submit).parameters} | {"--set"}
        assert {word for word in words if word.startswith("--")} <= known


class TestFineTuning:
    WHOLE = mobilenet_v2(10, 0.35, stem_strides=1)
    SHAPE = (8, 8, 3)

    def test_trained_variables_match_by_name_shape_and_dtype(self) -> None:
        tuned = frozen(with_head(self.WHOLE, Dense(4), "new_head"), until="new_head").variables(self.SHAPE)
        trained = self.WHOLE.variables(self.SHAPE)
        both = tuned.keys() & trained.keys()
        assert trained.keys() - both == {"head/kernel", "head/bias"}
        assert tuned.keys() - both == {"new_head/kernel", "new_head/bias"}
        assert all(
            (tuned[name].shape, tuned[name].dtype) == (trained[name].shape, trained[name].dtype) for name in both
        )
        assert {name for name in tuned if tuned[name].trainable} == tuned.keys() - both

    @pytest.mark.parametrize("until", ["head", "last"])
    def test_a_step_gives_gradients_and_updates_of_unfrozen_parts_only(self, until: str) -> None:
        net = frozen(self.WHOLE, until)
        variables, values = net.variables(self.SHAPE), begun(net, self.SHAPE)
        x = np.random.default_rng(2).normal(size=(4, *self.SHAPE)).astype(np.float32)
        logits, updates, pullback = net.apply(values, values, x, TrainingContext(3))
        gradients, dx = pullback(logits)
        assert dx is None
        assert gradients.keys() == {name for name, it in variables.items() if it.trainable}
        assert updates.keys() == {name for name, it in variables.items() if it.aggregation.name == "MEAN"}
        assert bool(updates) == (until == "last")

    def test_frozen_parts_are_those_before_one(self) -> None:
        net = frozen(mlp(2, (3,)), "relu0")
        assert {name: isinstance(layer, Frozen) for name, layer in net.layers} == {
            "flatten": True,
            "hidden0": True,
            "relu0": False,
            "head": False,
        }

    def test_a_head_takes_the_last_part_s_place(self) -> None:
        assert with_head(mlp(2), Dense(3)).layers == mlp(3).layers
        assert [name for name, _ in with_head(resnet(18), Dense(3), "digits").layers][-2:] == ["avgpool", "digits"]


FEATURES = {"a": (), "b": (), "n": ()}


class TestWideAndDeep:
    def model(self, **settings: Any) -> Parallel:
        return wide_deep({"a": 3, "b": 4}, ["n"], [("a", "b")], hidden=[6, 5], embedding=2, cross_rows=7, **settings)

    def test_has_these_variables(self) -> None:
        assert {name: it.shape for name, it in self.model().variables(FEATURES).items()} == {
            "wide/features/a/table": (3, 1),
            "wide/features/b/table": (4, 1),
            "wide/a*b/weights/table": (7, 1),
            "deep/features/a/table": (3, 2),
            "deep/features/b/table": (4, 2),
            "deep/hidden0/kernel": (5, 6),
            "deep/hidden0/bias": (6,),
            "deep/hidden1/kernel": (6, 5),
            "deep/hidden1/bias": (5,),
            "deep/head/kernel": (5, 1),
            "deep/head/bias": (1,),
        }
        assert self.model(classes=3).output_shape(FEATURES) == (3,)

    def test_learns_a_pair_by_its_wide_part(self) -> None:
        rng = np.random.default_rng(0)
        a, b = rng.integers(0, 3, 400), rng.integers(0, 4, 400)
        x = {"a": a, "b": b, "n": rng.normal(size=400).astype(np.float32)}
        labels = (a == b).astype(np.float32)
        params, _ = self.model().init(rng, FEATURES)
        assert not any(params[name].any() for name in params if name.startswith("wide/"))
        for step in range(200):
            logits, _, pullback = self.model().apply(params, {}, x, TrainingContext(step))
            _, by_logits = sigmoid_cross_entropy(logits, labels[:, None])
            gradients, _ = pullback(by_logits)
            params = {
                name: value - (2 * gradients[name] if name.startswith("wide/") else 0) for name, value in params.items()
            }
        assert AreaUnderCurve.of(logits, labels).value() > 0.95

    def test_names_a_feature_that_is_missing(self) -> None:
        says = r"layer 'wide/features' \(ByFeature\) got .*\{b: \(\), n: \(\)\}, but needs .* missing: a;"
        with pytest.raises(shoal.InvalidShape, match=says):
            self.model().variables({"b": (), "n": ()})

    def test_of_the_docs_has_as_many_parameters_as_they_say(self, documented: dict[str, Any]) -> None:
        count = sum(math.prod(it.shape) for it in documented["variables"].values())
        assert f"This model has {count:,} parameters" in DOCS.read_text()


def test_the_docs_have_the_counts() -> None:
    for _, _, parameters in PUBLISHED:
        assert f"{parameters:,}" in DOCS.read_text()


def test_a_head_is_the_only_part_that_depends_on_the_classes() -> None:
    few, many = (mobilenet_v2(classes, 0.35).variables((32, 32, 3)) for classes in (10, 100))
    assert {name for name in few if few[name] != many[name]} == {"head/kernel", "head/bias"}


# The same functions, for models of a wrong type.
any_frozen: Callable[..., Any] = frozen
any_with_head: Callable[..., Any] = with_head


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: resnet(19),
        lambda: mobilenet_v2(width=0),
        lambda: mlp(0),
        lambda: wide_deep({}),
        lambda: wide_deep({"a": 3}, crosses=[("a", "b")]),
        lambda: frozen(mlp(2), "body"),
        lambda: with_head(mlp(2), Dense(2), "hidden0"),
        lambda: any_frozen(wide_deep({"sex": 2}), "deep"),
        lambda: any_with_head(wide_deep({"sex": 2}), Dense(2)),
    ],
)
def test_unknown_models_and_parts_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(shoal.InvalidLayer):
        wrong()

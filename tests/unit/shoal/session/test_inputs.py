"""Inputs of users to a session, as arrays by variable. Each refusal names the variable and what to pass instead."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._session.inputs import Inputs, numbers_of, to_array, variables_of

VARIABLES = {"a/w": shoal.Variable((3,)), "b": shoal.Variable(())}


class TorchTensor:
    """A tensor of PyTorch, as NumPy sees it."""

    def __init__(self, dtype: str, reason: str) -> None:
        self.dtype, self._reason = dtype, reason

    def detach(self) -> "TorchTensor":
        return self

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(self._reason)


@pytest.mark.parametrize(
    ("tree", "place"),
    [({"a": []}, r"variables\['a'\]"), ({"a": ([], np.zeros(2))}, r"variables\['a'\]\[0\]"), ([], "variables")],
)
def test_an_empty_list_is_no_variable(tree: Any, place: str) -> None:
    with pytest.raises(errors.InvalidVariable, match=f"{place} is an empty list; give an array, such as"):
        variables_of(tree)
    assert variables_of({"a": None, "b": (), "c": np.zeros(2)})[0].keys() == {"c"}, "as trees of JAX have them"


def test_gradients_of_structured_arrays_are_refused() -> None:
    with pytest.raises(errors.InvalidGradient, match=r"variable 'b': .* is not an array of numbers"):
        inputs().gradients({"b": np.zeros((), "f4, f4")})


def inputs(optimizer: shoal.optim.Optimizer | None = None) -> Inputs:
    return Inputs(VARIABLES, None, optimizer or shoal.optim.SGD(0.1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TorchTensor("torch.bfloat16", "Got unsupported ScalarType BFloat16"), r"pass tensor.detach\(\).float\(\).cpu"),
        (TorchTensor("torch.float32", "can't convert cuda:0"), r"can't convert cuda:0; pass tensor.detach\(\).cpu\(\)"),
        (np.array([None, 1], object), "of dtype object is not an array of numbers"),
        ([[1.0], [1.0, 2.0]], "NumPy cannot read this list: .*inhomogeneous"),
        (object(), "a object of dtype object is not an array of numbers"),
        ("three", "of dtype <U5 is not an array of numbers"),
        (np.ones(3, complex), "has complex numbers .complex128.; give real and imaginary parts as two variables"),
    ],
)
def test_values_that_are_no_arrays_are_refused(value: Any, message: str) -> None:
    for call in (
        lambda: variables_of({"a": {"w": value}}),
        lambda: inputs().gradients({"a": {"w": value}}),
        lambda: inputs().pair(("a/w", value)),
    ):
        with pytest.raises((errors.InvalidVariable, errors.InvalidGradient), match=f"variable 'a/w'.*{message}"):
            call()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3, bool), "dtype bool is not supported; choose, or cast to, one of float32"),
        (True, "dtype bool is not supported"),
        ([True, False], "dtype bool is not supported"),
        (np.zeros((0, 3)), r"shape \(0, 3\) has a dimension of 0 or less"),
        (np.zeros(3, np.int8), "dtype int8 is not supported"),
    ],
)
def test_variables_of_other_dtypes_and_shapes_are_refused(value: Any, message: str) -> None:
    with pytest.raises(errors.InvalidVariable, match=f"variable 'a/w': .*{message}"):
        variables_of({"a": {"w": value}})


def test_variables_are_found_by_key_path() -> None:
    kept = shoal.Variable.of(np.ones(2), trainable=False)
    found, structure = variables_of({"a": [np.float32(3), kept], "none": None})
    assert list(found) == ["a/0", "a/1"]
    assert isinstance(found["a/0"], np.ndarray)
    assert found["a/0"].shape == ()
    assert found["a/0"].dtype == np.float32
    assert found["a/1"] is kept
    assert structure.rebuilt({"a/0": 1, "a/1": 2}) == {"a": [1, 2], "none": None}


def test_a_list_of_numbers_of_numpy_is_one_array() -> None:
    found, _ = variables_of({"w": [np.float64(1), np.float64(2)], "n": (np.int64(3), np.int64(4))})
    assert {name: np.asarray(it).tolist() for name, it in found.items()} == {"w": [1, 2], "n": [3, 4]}


def test_gradient_of_none_leaves_a_variable_unchanged_with_plain_sgd() -> None:
    found = inputs().gradients({"a": {"w": None}, "b": np.float32(1)})
    assert found["a/w"].tolist() == [0, 0, 0]
    assert found["a/w"].dtype == np.float32
    assert inputs().pair(("a/w", None))[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("optimizer", [shoal.optim.Adam(0.1), shoal.optim.SGD(0.1, weight_decay=0.1)])
def test_gradient_of_none_is_refused_where_zero_would_change_the_variable(optimizer: shoal.optim.Optimizer) -> None:
    message = rf"gradient of 'a/w' is None, and {type(optimizer).__name__} .*push np.zeros\(\(3,\), 'float32'\)"
    with pytest.raises(errors.InvalidGradient, match=message):
        inputs(optimizer).gradients({"a": {"w": None}, "b": np.float32(1)})
    with pytest.raises(errors.InvalidGradient, match=message):
        inputs(optimizer).pair(("a/w", None))


@pytest.mark.parametrize(
    "optimizer",
    [
        shoal.optim.SGD(0.1, clip_norm=1.0),
        shoal.optim.SGD(0.1, weight_decay=0.1, groups=[shoal.optim.VariableGroup("a/*", rate=3, weight_decay=0)]),
        shoal.optim.Adam(0.1, weight_decay=0.1, groups=[shoal.optim.VariableGroup("a/*", frozen=True)]),
    ],
)
def test_gradient_of_none_is_allowed_where_zero_leaves_that_variable_unchanged(
    optimizer: shoal.optim.Optimizer,
) -> None:
    assert inputs(optimizer).gradients({"a": {"w": None}, "b": np.float32(1)})["a/w"].tolist() == [0, 0, 0]
    assert inputs(optimizer).pair(("a/w", None))[1].tolist() == [0, 0, 0]


def test_a_refusal_of_none_names_only_the_variables_that_would_change() -> None:
    optimizer = shoal.optim.Adam(0.1, groups=[shoal.optim.VariableGroup("a/*", frozen=True)])
    with pytest.raises(errors.InvalidGradient, match="the gradient of 'b' is None, and Adam"):
        inputs(optimizer).pair(("b", None))
    with pytest.raises(errors.InvalidGradient, match="all gradients are None"):
        inputs(optimizer).gradients({"a": {"w": np.ones(3)}, "b": None})


def test_frozen_variables_may_all_have_gradients_of_none() -> None:
    optimizer = shoal.optim.Adam(0.1, groups=[shoal.optim.VariableGroup("*", frozen=True)])
    assert inputs(optimizer).gradients({"a/w": None, "b": None}).keys() == {"a/w", "b"}


def test_gradient_of_none_of_a_variable_that_is_not_trainable_is_left_out() -> None:
    kept = {**VARIABLES, "mean": shoal.Variable(3, trainable=False)}
    given = Inputs(kept, None, shoal.optim.Adam(0.1))
    assert given.gradients({"a/w": np.ones(3), "b": np.ones(()), "mean": None}).keys() == {"a/w", "b"}


def test_gradient_of_none_of_an_unknown_variable_is_left_to_the_push_to_refuse() -> None:
    assert inputs().pair(("c", None))[0] == "c"


def test_gradients_that_are_all_none_are_refused() -> None:
    with pytest.raises(errors.InvalidGradient, match=r"all gradients are None: .*loss.backward\(\).*skip\(\)"):
        inputs().gradients({"a/w": None, "b": None})


def test_names_must_be_strings() -> None:
    with pytest.raises(errors.InvalidGradient, match="gradients has the key 3, a int"):
        inputs().gradients({3: np.ones(3)})
    with pytest.raises(errors.InvalidGradient, match="name 3 of a gradient is a int; give a string"):
        inputs().pair((3, np.ones(3)))  # type: ignore[arg-type]


def test_numbers_take_the_dtype_of_their_variable() -> None:
    for number in (2.5, np.float64(2.5), np.float32(2.5)):
        assert inputs().gradients({"a/w": [1.0, 2.0, 3.0], "b": number})["b"].dtype == np.float32
    assert to_array("b", 3, errors.InvalidGradient, np.dtype("float32")).dtype == np.int64, "a whole number is no float"
    assert to_array("b", np.zeros(3), errors.InvalidGradient, np.dtype("float32")).dtype == np.float64, "an array keeps"


def test_arrays_are_not_copied() -> None:
    strided = np.arange(6, dtype=np.float32)[::2]
    halves = np.zeros((), ml_dtypes.bfloat16)
    found = inputs().gradients({"a": {"w": strided}, "b": halves})
    assert found["a/w"] is strided
    assert found["b"] is halves


def test_updates_of_none_are_left_out() -> None:
    assert inputs().updates({"a": {"w": None}, "b": np.float32(1)}).keys() == {"b"}


def test_numbers_of_variables_of_their_own_are_not_joined() -> None:
    scalars = Inputs({"s/0": shoal.Variable(()), "s/1": shoal.Variable(())}, None, shoal.optim.SGD(0.1))
    for numbers in ((1.0, 2.0), (np.float64(1), np.float64(2))):
        assert scalars.gradients({"s": numbers}) == {"s/0": 1, "s/1": 2}


def test_a_list_is_a_tree_only_if_the_variables_are_one() -> None:
    _, structure = variables_of([np.zeros(3)])
    assert Inputs({"0": shoal.Variable(3)}, structure, shoal.optim.SGD(0.1)).is_tree([np.ones(3)])
    assert not inputs().is_tree([("b", 1.0)])


@pytest.mark.parametrize("loss", [0.5, np.array(0.5), (0.5, "auxiliary")])
def test_a_value_with_gradients_is_not_taken_for_gradients(loss: Any) -> None:
    given: Any = (loss, {"a/w": np.ones(3), "b": np.ones(())})
    with pytest.raises(errors.InvalidGradient, match=r"jax\.value_and_grad returns; push only the gradients"):
        inputs().pairs(given)


def test_two_pairs_are_gradients() -> None:
    pairs = (("a/w", np.ones(3)), ("b", np.ones(())))
    assert [name for name, _ in inputs().pairs(pairs)] == ["a/w", "b"]


def test_an_array_inside_of_jit_is_refused_with_what_to_do() -> None:
    class DynamicJaxprTracer:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise TypeError("The numpy.ndarray conversion method __array__() was called on traced array")

    with pytest.raises(errors.InvalidGradient, match=r"call the session outside of jax\.jit"):
        inputs().gradients({"a": {"w": DynamicJaxprTracer()}, "b": np.ones(())})


def test_a_gradient_without_a_name_is_refused() -> None:
    with pytest.raises(errors.InvalidGradient, match="gradients contain a ndarray without a name; give a dict"):
        inputs().pair(np.ones(3))  # type: ignore[arg-type]


class LossWithGraph:
    """A loss of PyTorch before `detach`, whose conversion to a float makes PyTorch warn."""

    def detach(self) -> float:
        return 0.5

    def __float__(self) -> float:
        pytest.fail("PyTorch would warn")


def test_a_loss_of_pytorch_needs_no_detach() -> None:
    assert numbers_of({"loss": LossWithGraph()}) == {"loss": 0.5}  # type: ignore[dict-item]

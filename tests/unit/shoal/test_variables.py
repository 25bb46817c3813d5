import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors, variables
from shoal._numerics.elements import Aggregation
from shoal.initializers import Constant, Given, GlorotNormal, Normal, Uniform, Zeros
from shoal.partitioners import FixedShards, MaxSize, MinSize
from shoal.v1 import tensor_pb2
from shoal.variables import Variable, variable_from_array

UNKNOWN: Any = 99
# Without its types, for arguments of wrong types.
untyped_variable: Any = Variable

FLOATS = ["float32", "float64", "float16", "bfloat16"]

names = st.text(st.characters(min_codepoint=32, max_codepoint=0x24F), min_size=1, max_size=255).filter(str.isprintable)
shapes = st.lists(st.integers(1, 1000), max_size=3).map(tuple)
partitioner = st.sampled_from([None, FixedShards(3), MinSize(max_slices=4), MaxSize(1 << 20, max_slices=9)])
trained = st.builds(
    Variable,
    shapes,
    st.sampled_from(FLOATS),
    st.sampled_from([Zeros(), Constant(0.5), Uniform(-1, 1), Normal(seed=3), GlorotNormal(), Given()]),
    partitioner=partitioner,
)
assigned = st.builds(
    Variable,
    shapes,
    st.sampled_from(FLOATS),
    trainable=st.just(False),
    aggregation=st.sampled_from([None, "mean", "sum", "last"]),
    partitioner=partitioner,
)
counters = st.builds(
    Variable, shapes, st.just("int64"), trainable=st.just(False), aggregation=st.sampled_from(["sum", "last"])
)


@given(name=names, variable=trained | assigned | counters)
def test_proto_roundtrip(name: str, variable: Variable) -> None:
    message = tensor_pb2.Variable.FromString(variable.to_proto(name).SerializeToString())
    assert variables.from_protos([message]) == {name: variable}


def test_decoded_variables_that_are_equal_are_one_object() -> None:
    decoded = variables.from_protos([Variable(4, initializer=Normal()).to_proto(name) for name in ("a", "b")])
    assert [*decoded] == ["a", "b"]
    assert decoded["a"] is decoded["b"]
    message = Variable(4).to_proto("c")
    message.dtype = tensor_pb2.DTYPE_UNSPECIFIED
    for name in ("c", "d"):  # each refusal names its own variable
        message.name = name
        with pytest.raises(errors.InvalidVariable, match=f"variable '{name}': its dtype"):
            variables.from_protos([message])


def test_defaults() -> None:
    variable = Variable((784, 10))
    assert variable.dtype == np.float32
    assert variable.initializer == Zeros()
    assert variable.trainable
    assert variable.aggregation is Aggregation.TRAINABLE
    assert variable.slices() == [(0, 784)]
    assert (variable.size, variable.nbytes) == (7840, 31360)


def test_one_form_for_each_argument() -> None:
    assert Variable(3, np.float32) == Variable([3], "float32") == untyped_variable(np.array([3]), np.dtype("float32"))
    assert Variable((), ml_dtypes.bfloat16) == Variable((), "bfloat16")
    assert Variable((), trainable=False) == Variable((), trainable=False, aggregation="last")
    assert hash(Variable(3)) == hash(Variable((3,)))


def test_scalar_has_one_row() -> None:
    assert Variable((), partitioner=FixedShards(4)).slices() == [(0, 1)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_array_of_floats_is_trained(dtype: str) -> None:
    assert variable_from_array(np.ones((2, 3), dtype)) == Variable((2, 3), dtype, Given())


def test_array_of_integers_is_assigned() -> None:
    assert variable_from_array(np.ones(2, np.int64)) == Variable(2, "int64", Given(), trainable=False)


def test_variable_of_an_array_keeps_its_values() -> None:
    mean = np.arange(3, dtype=np.float16)
    variable = Variable.of(mean, trainable=False, aggregation="mean")
    assert variable == Variable(3, "float16", Given(), trainable=False, aggregation="mean")
    assert variable.values is mean
    assert Variable.of(2.5).dtype == np.float64


def test_an_array_that_numpy_cannot_read_is_refused_with_what_to_pass() -> None:
    class Tensor:
        """A tensor of PyTorch that has a gradient."""

        def detach(self) -> None: ...

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")

    with pytest.raises(errors.InvalidVariable, match=r"Variable.of: .* requires grad.; pass tensor.detach\(\).cpu"):
        untyped_variable.of(Tensor())
    assert Variable(3).values is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Variable((0, 3)),
            "shape (0, 3) has a dimension of 0 or less, so there is nothing to train; leave the variable out",
        ),
        (lambda: Variable(-1), "shape (-1,) has a dimension of 0 or less"),
        (lambda: untyped_variable((2.5,)), "shape is (2.5,); it must consist of integers"),
        (lambda: untyped_variable("ab"), "shape is 'ab'; it must consist of integers"),
        (
            lambda: Variable(3, "int32"),
            "dtype int32 is not supported; choose, or cast to, one of float32, float64, float16, bfloat16, int64",
        ),
        (lambda: Variable(3, "float31"), "dtype float31 is not supported"),
        (lambda: Variable(3, ">f4"), "dtype >f4 is not supported"),
        (
            lambda: Variable(3, "int64"),
            'a variable of int64 cannot be trained or averaged; set trainable=False and aggregation="sum" or '
            '"last", or choose a float dtype',
        ),
        (
            lambda: Variable(3, "int64", trainable=False, aggregation="mean"),
            "a variable of int64 cannot be trained or averaged",
        ),
        (
            lambda: Variable(3, aggregation="mean"),
            "aggregation is 'mean', but a trainable variable is changed by the optimizer; set trainable=False, or "
            "leave the aggregation out",
        ),
        (
            lambda: untyped_variable(3, trainable=False, aggregation="max"),
            "aggregation 'max' is not one of mean, sum, last",
        ),
        (
            lambda: untyped_variable(3, initializer="zeros"),
            "initializer is 'zeros'; it must be an instance of an initializer, such as Zeros()",
        ),
        (
            lambda: untyped_variable(3, initializer=Zeros),
            "initializer is <class 'shoal.initializers.Zeros'>; it must be",
        ),
        (
            lambda: untyped_variable(3, partitioner=4),
            "partitioner is 4; it must be an instance of a partitioner, such as FixedShards(4), or None",
        ),
        (
            lambda: Variable(3, "int64", Normal(), trainable=False),
            "initializer Normal: it draws real numbers, but the variable is int64",
        ),
        (lambda: Variable(100_000, partitioner=MaxSize(4)), "partitioner MaxSize: it cuts the shape (100000,)"),
        (lambda: Variable(3).to_proto(""), "'' is not a valid variable name; use 1 to 255 printable characters"),
        (lambda: Variable(3).to_proto("a\0b"), "'a\\x00b' is not a valid variable name"),
        (lambda: Variable(3).to_proto("a" * 256), f"'{'a' * 256}' is not a valid variable name"),
        (lambda: variable_from_array(np.ones(3, bool)), "dtype bool is not supported"),
        (lambda: variable_from_array(np.ones((0, 3))), "shape (0, 3) has a dimension of 0 or less"),
    ],
)
def test_invalid_variable_raises_an_error_with_advice(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.InvalidVariable) as raised:
        make()
    assert raised.value.message.startswith(message)


@pytest.mark.parametrize(
    ("shape", "limit", "text"),
    [
        ((1,) * 33, "TENSOR_RANK", "a shape has 33 dimensions; the limit TENSOR_RANK is 32"),
        ((1,) * 65, "TENSOR_RANK", "a shape has 65 dimensions; the limit"),
        (
            (1 << 20, 1 << 20),
            "TENSOR_BYTES",
            "a variable of shape (1048576, 1048576) and float32 has 4.0 TiB; the limit TENSOR_BYTES is 1099511627776; "
            "check the shape, or split the variable into several",
        ),
        (1 << 63, "TENSOR_BYTES", "has 33,554,432.0 TiB"),
        ((1 << 63,) * 32, "TENSOR_BYTES", "has over 2^40 TiB; the limit TENSOR_BYTES is"),
    ],
    ids=["rank 33", "rank 65", "4 TiB", "2^63 elements", "2^2016 elements"],
)
def test_a_variable_that_is_too_large_is_refused_with_the_name_of_the_limit(
    shape: int | tuple[int, ...], limit: str, text: str
) -> None:
    with pytest.raises(errors.LimitExceeded) as refused:
        Variable(shape)
    assert text in str(refused.value)
    assert refused.value.details["limit"] == limit


def test_a_message_with_millions_of_dimensions_is_refused_before_they_are_copied() -> None:
    message = Variable(3).to_proto("w")
    message.shape.extend([1] * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(errors.LimitExceeded, match="variable 'w': a shape has 1000001 dimensions") as refused:
            variables.from_protos([message])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert sum(map(len, refused.value.details.values())) < 1_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (tensor_pb2.Variable(dtype=UNKNOWN), "its dtype or its aggregation is missing or unknown"),
        (tensor_pb2.Variable(aggregation=UNKNOWN), "its dtype or its aggregation is missing or unknown"),
        (tensor_pb2.Variable(shape=[0]), "shape (3, 0) has a dimension of 0 or less"),
        (tensor_pb2.Variable(initializer=tensor_pb2.Initializer(name="lecun")), "there is no initializer 'lecun'"),
        (tensor_pb2.Variable(partitioner=tensor_pb2.Partitioner(name="hash")), "there is no partitioner 'hash'"),
    ],
)
def test_errors_of_messages_name_the_variable(changes: tensor_pb2.Variable, message: str) -> None:
    broken = Variable(3).to_proto("bias")
    broken.MergeFrom(changes)
    with pytest.raises(errors.InvalidVariable) as raised:
        variables.from_protos([broken])
    assert raised.value.message.startswith(f"variable 'bias': {message}")
    assert raised.value.details["variable"] == "bias"


def test_empty_message_is_refused() -> None:
    with pytest.raises(errors.InvalidVariable, match="is not a valid variable name"):
        variables.from_protos([tensor_pb2.Variable()])

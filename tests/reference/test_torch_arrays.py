"""Tensors of PyTorch that NumPy cannot read: the error names the place and the cure."""

import pytest

from shoal import errors
from shoal._session.inputs import variables_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")


def test_a_bfloat16_tensor_is_refused_with_the_cure() -> None:
    with pytest.raises(errors.InvalidVariable) as raised:
        variables_of({"layer": {"w": torch.ones(3, dtype=torch.bfloat16)}})
    assert "'layer/w'" in raised.value.message
    assert ".float()" in raised.value.message

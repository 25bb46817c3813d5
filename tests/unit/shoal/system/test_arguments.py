"""Checks of arguments that are whole numbers."""

from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal._system import check_count


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_integers_of_numpy_are_whole_numbers(value: Any) -> None:
    count = check_count("n", value, 1)
    assert (count, type(count)) == (3, int)


@pytest.mark.parametrize("value", [0, -1, 3.0, np.float64(3), "3", None, True, np.True_, np.array([3, 4]), np.array(0)])
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(errors.BadRequest, match="it must be a whole number, 1 or more"):
        check_count("n", value, 1)

"""Reasons why a job cannot begin with a checkpoint: all differences, and advice that fits them."""

import numpy as np
import pytest

from shoal._checkpoint import restore_problem

Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]

FLOAT = np.dtype(np.float32)
SAVED: Shapes = {"w": ((4, 2), FLOAT), "b": ((2,), FLOAT)}
CHANGED: Shapes = {**SAVED, "w": ((8, 2), FLOAT)}
NEW: Shapes = {**SAVED, "head": ((3,), FLOAT)}
OTHER = "it was trained with adam"
SETTINGS = (
    "submit the job with the settings of the checkpoint's job, or give the changed variables other names in the "
    "program and use a partial restore"
)
SHAPE = "'w' was saved as float32[4, 2], but is float32[8, 2]"


@pytest.mark.parametrize(
    ("wanted", "optimizer", "said"),
    [
        (SAVED, "", ""),
        (CHANGED, "", f"{SHAPE}; {SETTINGS}"),
        (CHANGED, OTHER, f"{OTHER}; {SHAPE}; {SETTINGS}"),
        ({**NEW, **CHANGED}, "", f"{SHAPE}; 'head' was not saved; {SETTINGS}"),
        (NEW, "", "'head' was not saved; to leave out variables that only one side has, use a partial restore"),
        (SAVED, OTHER, f"{OTHER}; use the same optimizer, or a partial restore, which reads only values"),
    ],
)
def test_the_advice_fits_the_differences(wanted: Shapes, optimizer: str, said: str) -> None:
    assert restore_problem(wanted, SAVED, partial=False, optimizer=optimizer) == said


def test_a_partial_restore_needs_only_the_shapes_that_both_have() -> None:
    assert restore_problem(NEW, SAVED, partial=True) == ""
    assert restore_problem(CHANGED, SAVED, partial=True) == (
        f"{SHAPE}; to initialize a changed variable again, give it another name in the program"
    )


def test_an_error_has_a_bounded_number_of_reasons() -> None:
    many = {f"v{number:02}": ((1,), FLOAT) for number in range(52)}
    said = restore_problem(many, {}, partial=False)
    assert said.startswith("'v00' was not saved; ")
    assert "'v49' was not saved; and 2 more; to leave out" in said

"""Programs that tests run and that the host may lack."""

import os
import shutil

import pytest


def need(*names: str, source: str, failing: tuple[str, ...] = ("SHOAL_E2E",)) -> str:
    """The path of a program, the first of these names that is here.

    Without one the test is skipped with a word, and fails where that is no answer.

    Args:
        names: of the program.
        source: where to get it.
        failing: variables of the environment of which any, set, makes it fail. `make e2e` sets SHOAL_E2E.
    """
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    complaint = f"there is no {' nor '.join(names)} here: {source}"
    if any(map(os.environ.get, failing)):
        pytest.fail(complaint)
    pytest.skip(complaint)

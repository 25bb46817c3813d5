"""Programs that tests run and that the host may lack."""

import os
import shutil
from typing import NoReturn

import pytest


def need(*names: str, source: str, failing: tuple[str, ...] = ("SHOAL_E2E",)) -> str:
    """Returns the path of a program: the first of these names that is installed.

    If none is installed, it skips the test with the reason, or fails the test where the program is required.

    Args:
        names: names of the program.
        source: where to get it.
        failing: environment variables. If any of them is set, the test fails. `make e2e` sets SHOAL_E2E.
    """
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        without(f"there is no {' nor '.join(names)} here: {source}", failing=failing)
    return found


def without(complaint: str, *, failing: tuple[str, ...] = ("SHOAL_E2E",)) -> NoReturn:
    """Skips the test because the host lacks something, or fails it where that is required.

    Args:
        complaint: what the host lacks, and what to do.
        failing: as for `need`.
    """
    if any(map(os.environ.get, failing)):
        pytest.fail(complaint)
    pytest.skip(complaint)

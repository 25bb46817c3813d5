"""Fixtures of the tests with PyTorch, which may be missing, as in `make long`."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    pytest.importorskip("torch").set_num_threads(1)

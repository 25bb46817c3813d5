"""Fixtures of the tests with PyTorch, which may be missing, as in `make long`."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    pytest.importorskip("torch").set_num_threads(1)


@pytest.fixture(scope="session")
def forks() -> ForkServerContext:
    """Starts processes that have PyTorch already: its import takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.utils.data", "shoal.torch"])
    return context

"""Messages of a server about the compilation of its kernels."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any
from unittest.mock import Mock

import pytest
from numba import types
from structlog.testing import capture_logs

from shoal._numerics.kernels import GROUP
from shoal_server.optimizers import compilation


def test_each_kernel_that_is_compiled_is_told_and_the_first_one_as_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(
        dispatcher: Mock, _: Any, *, on_compile: Callable[[], None], on_wait: Callable[[], None], **__: Any
    ) -> None:
        on_wait()
        if dispatcher is not cached:
            on_compile()

    cached = Mock()
    monkeypatch.setattr(compilation, "registered", [(Mock(), []), (cached, []), (Mock(), [])])
    monkeypatch.setattr(compilation, "prepare", prepare)
    monkeypatch.setattr(compilation, "shared_folder", lambda _: None)
    with capture_logs() as logs:
        compilation.load_kernels()
    assert {it["of"] for it in logs} == {3}
    assert [(it["log_level"], it["event"], it["kernel"]) for it in logs] == [
        ("info", "waiting for another process, which compiles the kernels", 1),
        (
            "warning",
            "compiling kernels, which takes about ten seconds of one core at the first start of this version",
            1,
        ),
        ("info", "compiling kernels", 3),
    ]


def test_kernels_for_another_processor_are_compiled_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, foreign = Mock(), Mock(side_effect=AssertionError("this processor lacks its instructions"))
    monkeypatch.setattr(compilation, "registered", [(foreign, [(types.float32,)])])
    monkeypatch.setattr(compilation, "prepare", prepared)
    monkeypatch.setattr(compilation, "shared_folder", lambda _: None)
    compilation.compile_kernels()
    assert prepared.call_args.args == (foreign, [(types.float32,)])


def test_an_image_compiles_the_kernels_by_functions_that_run_none() -> None:
    found = {point.name: point.load() for point in entry_points(group=GROUP)}
    assert found["server"] is compilation.compile_kernels

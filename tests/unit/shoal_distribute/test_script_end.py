"""End of a script: what counts as a failure, at the exit of the process and at the end of a `with` block."""

import sys

import pytest

from shoal import errors
from shoal._training import failure_at_exit, failure_of
from shoal_distribute import OneDeviceStrategy


class RecordedStrategy(OneDeviceStrategy):
    """A strategy that keeps why it was closed, and can fail to close.

    Attributes:
        ends: the texts with which it was closed.
        fails: whether its job cannot be ended.
    """

    def __init__(self) -> None:
        super().__init__("/cpu:0")
        self.ends: list[str] = []
        self.fails = False

    def close(self, error: str = "") -> None:
        super().close(error)
        self.ends.append(error)
        if self.fails:
            raise errors.Unreachable("no coordinator")


@pytest.mark.parametrize("error", [None, SystemExit(), SystemExit(0)])
def test_exits_without_an_error_are_successes(error: BaseException | None) -> None:
    assert failure_of(error) == ""


@pytest.mark.parametrize("error", [SystemExit(1), SystemExit("no data"), ValueError("no data"), KeyboardInterrupt()])
def test_other_exceptions_are_failures(error: BaseException) -> None:
    assert failure_of(error).startswith(f"the session raised {type(error).__name__}")


def test_the_exit_knows_an_uncaught_exception_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert failure_at_exit() == ""
    monkeypatch.setattr(sys, "last_value", ValueError("no data"), raising=False)
    assert failure_at_exit().startswith("the session raised ValueError: no data")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # a notebook: the exception is an earlier statement's
    assert failure_at_exit() == ""


def test_a_with_block_closes_a_strategy_with_its_error() -> None:
    strategy = RecordedStrategy()
    with strategy:
        pass
    with pytest.raises(SystemExit), strategy:
        sys.exit(1)
    assert [text[:30] for text in strategy.ends] == ["", "the session raised SystemExit:"]


def test_an_error_in_a_with_block_comes_before_that_of_its_end() -> None:
    strategy = RecordedStrategy()
    strategy.fails = True
    with pytest.raises(ValueError, match="first") as raised, strategy:
        raise ValueError("first")
    assert raised.value.__notes__ == ["the strategy could not be closed: no coordinator"]
    with pytest.raises(errors.Unreachable), strategy:
        pass

"""Deprecation: the use of a deprecated name warns, the warning points to the right line, and the name still works."""

import warnings
from dataclasses import dataclass

import pytest

from shoal._system import deprecated, warn_deprecated

SAID = "is deprecated since Shoal 0.4 and will be removed in 0.6; use "


@deprecated(since="0.4", removed_in="0.6", instead="add")
def plus(a: int, *, b: int = 1) -> int:
    """Adds."""
    return a + b


class Session:
    @deprecated(since="0.4", removed_in="0.6", instead="Session.push")
    def send(self, value: int) -> int:
        return value


@deprecated(since="0.4", removed_in="0.6", instead="Point")
@dataclass
class Pair:
    a: int
    b: int = 2


class Triple(Pair):
    pass


@deprecated(since="0.4", removed_in="0.6", instead="Point")
class Made:
    def __new__(cls, value: int) -> "Made":
        made = super().__new__(cls)
        made.value = value
        return made

    value: int


def test_a_function_warns_at_the_line_that_calls_it_and_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"^plus " + SAID + "add$") as caught:
        assert plus(1, b=2) == 3
    assert [warning.filename for warning in caught] == [__file__]
    assert (plus.__name__, plus.__doc__) == ("plus", "Adds.")


def test_a_method_warns_by_its_qualified_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"^Session\.send " + SAID + r"Session\.push$"):
        assert Session().send(3) == 3


@pytest.mark.parametrize("kind", [Pair, Triple])
def test_a_class_warns_when_it_is_instantiated_and_stays_a_class(kind: type[Pair]) -> None:
    with pytest.warns(DeprecationWarning, match=r"^Pair " + SAID + "Point$") as caught:
        made = kind(1)
    assert (made.a, made.b) == (1, 2)
    assert isinstance(made, Pair)
    assert [warning.filename for warning in caught] == [__file__]


def test_deprecated_class_with_new_keeps_its_arguments() -> None:
    with pytest.warns(DeprecationWarning, match="^Made "):
        assert Made(7).value == 7


def test_decorating_a_function_does_not_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deprecated(since="0.4", removed_in="0.6", instead="nothing")(lambda: None)
    assert caught == []


def test_tools_find_the_message_where_pep_702_has_it() -> None:
    assert plus.__deprecated__ == f"plus {SAID}add"  # type: ignore[attr-defined]
    assert Pair.__deprecated__ == f"Pair {SAID}Point"  # type: ignore[attr-defined]


def test_a_coroutine_function_is_refused() -> None:
    async def later() -> None: ...

    with pytest.raises(TypeError, match=r"later is a coroutine function; `deprecated` wraps only plain functions"):
        deprecated(since="0.4", removed_in="0.6", instead="now")(later)


def test_an_argument_is_named_as_users_write_it() -> None:
    def job(goal: str | None = None) -> None:
        if goal is not None:
            warn_deprecated("job(goal=...)", since="0.4", removed_in="0.6", instead="mode")

    with pytest.warns(DeprecationWarning, match=r"^job\(goal=\.\.\.\) " + SAID + "mode$") as caught:
        job(goal="less")
    assert [warning.filename for warning in caught] == [__file__]

"""The count of open streams: a limit in all, and a share for each caller."""

from contextlib import ExitStack

import pytest

from shoal import errors
from shoal._limits import catalogue
from shoal._security import AccessRole, Principal
from shoal_coordinator.watchers import Watchers

ANN, BOB = (Principal(name, AccessRole.READER, f"token-of-{name}") for name in ("ann", "bob"))
SHARE = catalogue.CALLER_WATCHERS.default


def watchers(most: int | None = None) -> Watchers:
    return Watchers(catalogue.WATCHERS, catalogue.CALLER_WATCHERS, "calls watch jobs", most=most)


def test_one_caller_leaves_room_for_others() -> None:
    count = watchers()
    assert count.most >= 4 * SHARE
    with ExitStack() as ann:
        for _ in range(SHARE):
            ann.enter_context(count.one_more(ANN))
        again = Principal("ann", AccessRole.READER, "another-token")
        with pytest.raises(errors.Overloaded, match=f"for 'ann', {SHARE} calls watch jobs; the limit CALLER_WATCHERS"):
            count.check(again)
        with count.one_more(BOB):
            assert count.open == SHARE + 1
    count.check(ANN)
    assert count.open == 0


def test_all_callers_together_have_a_limit() -> None:
    count = watchers(most=2)
    refused = pytest.raises(errors.Overloaded, match="2 calls watch jobs; the limit WATCHERS is 2; end one, or try")
    with count.one_more(ANN), count.one_more(None), refused:
        count.check(BOB)
    with count.one_more(BOB):
        pass


def test_callers_that_are_not_known_have_no_share() -> None:
    count = watchers()
    with ExitStack() as stack:
        for _ in range(SHARE + 1):
            stack.enter_context(count.one_more(None))

"""Further options of roles."""

from typing import Any

import pytest

from shoal import errors
from shoal._engines import check_flags


def test_options_become_texts() -> None:
    assert check_flags(None) == {}
    assert check_flags({"server": ("--rpc-threads", 4)}) == {"server": ["--rpc-threads", "4"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer": ["--x"]}, "flags has 'trainer'.*with the keys coordinator, server, worker"),
        ({"worker": "--x"}, "flags has 'worker': '--x'; give a dict of lists"),
        ({"worker": 7}, "flags has 'worker': 7"),
        (["--x"], "flags is"),
    ],
)
def test_wrong_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        check_flags(given)

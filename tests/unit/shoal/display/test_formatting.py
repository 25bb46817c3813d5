"""Formatting of short texts for people."""

import pytest

from shoal._display import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 servers"), (1, "1 server"), (2, "2 servers"), (1437, "1,437 servers")]
)
def test_a_count_has_its_plural(number: int, text: str) -> None:
    assert counted(number, "server") == text

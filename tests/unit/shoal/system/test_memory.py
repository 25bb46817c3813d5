"""A server's memory limit, as read from control groups of both versions."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal._system import memory_limit


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 1000),
        ({"memory.max": "700\n"}, 700),
        ({"memory.max": "max\n"}, 1000),
        ({"memory/memory.limit_in_bytes": "600\n"}, 600),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1000),  # version 1's word for none
    ],
    ids=str,
)
def test_limit_is_the_smallest_one_found(tmp_path: Path, files: Mapping[str, str], limit: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path, physical=1000) == limit


def test_limit_of_this_machine_is_above_1_mib(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) > 1 << 20

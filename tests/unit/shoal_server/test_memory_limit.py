"""How much memory a server may use, as control groups of both versions say it."""

import pytest

from shoal_server.memory_limit import memory_limit


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
def test_the_least_of_what_there_is(tmp_path, files, limit):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path, physical=1000) == limit


def test_of_this_machine_it_is_more_than_nothing(tmp_path):
    assert memory_limit(tmp_path) > 1 << 20

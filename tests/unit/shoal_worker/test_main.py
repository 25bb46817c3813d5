"""Default names of workers."""

import re

import pytest

from shoal._role.lifecycle import default_name


@pytest.mark.parametrize("host", ["gpu-7.example.org", "Some_Host", "x" * 200, "-", None])
def test_a_name_is_one_that_the_contract_allows(host: str | None) -> None:
    name = default_name("worker", host)
    assert re.fullmatch(r"[a-z0-9-]{1,63}", name)
    assert default_name("worker", host) != name

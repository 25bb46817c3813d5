"""The table of limits: complete, and in agreement with the code that names limits."""

import re
from pathlib import Path

import pytest

from shoal import errors
from shoal._limits import Limit, catalogue, count_refusal, refusals

SOURCES = [
    file
    for folder in ("client/shoal", "server", "worker")
    for file in (Path(__file__).parents[4] / folder).rglob("*.py")
    if "v1" not in file.parts
]


def test_the_name_of_a_limit_is_the_name_of_its_constant() -> None:
    constants = {name: it for name, it in vars(catalogue).items() if isinstance(it, Limit)}
    assert {name: it.name for name, it in constants.items()} == {name: name for name in constants}
    assert {it.name for it in catalogue.LIMITS} == constants.keys()


def test_every_limit_that_the_code_names_is_in_the_table() -> None:
    named = {name for file in SOURCES for name in re.findall(r'limit="(\w+)"', file.read_text())}
    assert named
    assert named <= {it.name for it in catalogue.LIMITS}


@pytest.mark.parametrize("limit", catalogue.LIMITS, ids=lambda it: it.name)
def test_every_limit_is_enforced_or_says_what_happens(limit: Limit) -> None:
    assert limit.default > 0 or limit.shown
    assert limit.roles or limit.excess
    uses = [file for file in SOURCES if f"{limit.name}." in file.read_text() and file.name != "catalogue.py"]
    uses += [file for file in SOURCES if re.search(rf"catalogue\.{limit.name}\b", file.read_text())]
    assert uses, "nothing uses it"


def test_a_refusal_names_its_limit_and_its_option() -> None:
    error = catalogue.JOB_BYTES.refusal("the job has 9 bytes", "use less", limit=8, job="a")
    assert isinstance(error, errors.LimitExceeded)
    assert error.status == "RESOURCE_EXHAUSTED"
    assert error.message == "the job has 9 bytes; the limit JOB_BYTES is 8 (--max-job-bytes); use less"
    assert error.details == {"job": "a", "limit": "JOB_BYTES"}


def test_refusals_count_by_limits_of_the_table_only() -> None:
    before = refusals("coordinator")
    count_refusal(catalogue.JOB_BYTES.refusal("too many"))
    count_refusal(errors.Overloaded("from elsewhere", limit="x" * 1_000))
    count_refusal(errors.BadRequest("without a limit"))
    after = refusals("coordinator")
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {"JOB_BYTES": 1}
    assert "JOB_BYTES" not in refusals("server")

"""Names of programs as newcomers write them, and the errors that say how to write them."""

from typing import Any

import pytest

import shoal
from shoal import errors
from shoal._job.checks import check_importable, program_name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("./digits.py:Digits", "such as digits:Digits"),
        ("examples/digits.py:Digits", "such as digits:Digits, and give workers its folder (shoal up --path examples)"),
        ("digits.py", "such as digits:FACTORY"),
        ("digits.Digits", "such as digits:Digits"),
        ("a.b.Digits", "such as a.b:Digits"),
        ("digits", "write package.module:factory"),
        ("/", "write package.module:factory"),
    ],
)
def test_a_name_that_is_none_gets_the_one_that_is_meant(given: str, said: str) -> None:
    with pytest.raises(errors.InvalidJob) as raised:
        program_name("program", given)
    assert raised.value.message == f"program {given!r} does not name a factory; " + (
        said if said.startswith("write") else f"write package.module:factory, {said}"
    )


def test_a_class_gets_its_name() -> None:
    with pytest.raises(errors.InvalidJob, match=r"here 'shoal\.client:Client'"):
        program_name("program", shoal.Client)


def test_a_class_of_a_notebook_gets_a_way() -> None:
    kind = type("Digits", (), {"__module__": "__main__"})
    with pytest.raises(errors.InvalidJob, match=r"%%writefile digits\.py, and name it as digits:Digits"):
        program_name("program", kind)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("digits.py:Digits", "drop .py: digits:Digits"),
        ("vision.digits.py:Digits", "drop .py: vision.digits:Digits"),
        ("__main__:Digits", "a cell that begins with %%writefile digits.py, and name it as digits:Digits"),
        ("__main__:Line", "%%writefile line.py, and name it as line:Line"),
    ],
)
def test_what_workers_cannot_import_is_refused(program: str, said: str) -> None:
    for check in (check_importable, shoal.Job):
        with pytest.raises(errors.InvalidJob) as raised:
            check(program)
        assert said in raised.value.message


@pytest.mark.parametrize("program", ["", "digits:Digits", "pyramid.digits:Digits"])
def test_what_workers_can_import_is_not(program: str) -> None:
    check_importable(program)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("clip_norm", r"it is an argument of the optimizer: optimizer=shoal.optim.Adam\(clip_norm=...\)"),
        ("lr", r"it is an argument of the optimizer: optimizer=shoal.optim.Adam\(lr=...\)"),
        ("epoch", r"did you mean epochs\?"),
        ("zzz", r"options are program, name, workers, .*evaluation"),
    ],
)
def test_an_unknown_argument_is_refused_with_advice(name: str, advice: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=rf"shoal.Job\(\) got an unexpected keyword argument '{name}'; {advice}"):
        shoal.Job("digits:Digits", **unknown)

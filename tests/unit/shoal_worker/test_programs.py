"""Loading of programs, and the errors about a reference that names no program."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from shoal import errors
from shoal.consistency import Asynchronous, Synchronous
from shoal.initializers import Given
from shoal.program import Dataset, Program, StepOutput
from shoal.variables import Variable
from shoal_worker.programs import Increments, as_program_error, load_program, summed

_numbers = itertools.count()

_GOOD = """
import numpy as np

class Samples:
    def __len__(self):
        return 10
    def batch(self, indices):
        return indices

class Good:
    dataset = Samples()
    def __init__(self, hidden):
        self.hidden = hidden
    def variables(self):
        return {"w": np.zeros(self.hidden)}
    def loss_and_gradients(self, params, batch):
        return 0.0, {"w": params["w"]}

def classifier(hidden: int = 4) -> Good:
    return Good(hidden)

def regressor(*, depth) -> "Good":
    return Good(depth)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module and gives its name, a new one each time."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"program_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return write


def test_a_program_is_loaded_with_its_settings(module: Callable[[str], str]) -> None:
    program = load_program(f"{module(_GOOD)}:classifier", {"hidden": 7})
    assert isinstance(program, Program)
    assert isinstance(program.dataset, Dataset)
    assert program.variables()["w"].shape == (7,)


def test_a_program_without_data_says_so(module: Callable[[str], str]) -> None:
    name = module(_GOOD + "\nGood.dataset = None\n")
    assert load_program(f"{name}:classifier", {}).dataset is None


@pytest.mark.parametrize("reference", ["digits", "digits:", ":mlp", ""])
def test_a_reference_names_a_module_and_a_factory(reference: str) -> None:
    with pytest.raises(errors.ProgramError, match=r"package\.module:factory"):
        load_program(reference, {})


def test_a_missing_module_is_named_with_where_it_was_searched_for() -> None:
    with pytest.raises(errors.ProgramError, match=r"No module named 'no_such_place'[\s\S]*--path"):
        load_program("no_such_place.models:mlp", {})


def test_a_module_with_the_suffix_of_its_file_gets_the_right_name(module: Callable[[str], str]) -> None:
    name = module(_GOOD)
    with pytest.raises(
        errors.ProgramError, match=rf"No module named '{name}\.py'[\s\S]*leave out \.py: {name}:classifier$"
    ):
        load_program(f"{name}.py:classifier", {})


def test_a_module_that_raises_shows_the_programs_frames_only(module: Callable[[str], str]) -> None:
    name = module("def broken():\n    return 1 / 0\n\nbroken()\n")
    with pytest.raises(errors.ProgramError) as raised:
        load_program(f"{name}:mlp", {})
    message = raised.value.message
    assert f"importing {name} raised ZeroDivisionError: division by zero" in message
    assert f"{name}.py" in message
    assert "return 1 / 0" in message
    assert "importlib" not in message
    assert "programs.py" not in message
    assert "--path" not in message


def test_a_syntax_error_shows_the_line(module: Callable[[str], str]) -> None:
    with pytest.raises(errors.ProgramError, match=r"SyntaxError[\s\S]*def ]"):
        load_program(f"{module('def ]')}:mlp", {})


def test_a_module_that_exits_is_an_error_too(module: Callable[[str], str]) -> None:
    with pytest.raises(errors.ProgramError, match="SystemExit: 3"):
        load_program(f"{module('raise SystemExit(3)')}:mlp", {})


def test_an_unknown_factory_lists_names_that_are_near(module: Callable[[str], str]) -> None:
    with pytest.raises(errors.ProgramError, match=r"has no clasifier; did you mean classifier\?"):
        load_program(f"{module(_GOOD)}:clasifier", {})


def test_a_factory_that_is_no_function(module: Callable[[str], str]) -> None:
    with pytest.raises(errors.ProgramError, match="mlp must be a function, not int"):
        load_program(f"{module('mlp = 3')}:mlp", {})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from subprocess import run as mlp", "no annotation, so it is not called; if it returns a program, write"),
        ("from os import system as mlp", "is a builtin_function_or_method, which is not called"),
        ("from subprocess import Popen as mlp", r"is a class that has no method variables\(\)"),
        ("import functools, os\nmlp = functools.partial(os.system, 'exit 1')", "is a partial, which is not called"),
        ("class Caller:\n    def __call__(self): ...\nmlp = Caller()", "is a Caller, which is not called"),
        ("def mlp() -> int: ...", "is annotated with int, which is no program"),
        ("def mlp() -> 'Nowhere': ...", r"'Nowhere', which cannot be resolved .*TYPE_CHECKING"),
        ("import shoal\ndef mlp() -> shoal.Program | None: ...", "which is no program"),
    ],
)
def test_a_callable_that_is_no_factory_of_programs_is_not_called(
    module: Callable[[str], str], source: str, said: str
) -> None:
    with pytest.raises(errors.ProgramError, match=said):
        load_program(f"{module(source)}:mlp", {})


@pytest.mark.parametrize(
    "annotation", ["shoal.Program", "'Good'", "shoal.program.RandomProgram", "Good | shoal.Program", "Generic[int]"]
)
def test_a_function_says_by_its_annotation_that_it_returns_a_program(
    module: Callable[[str], str], annotation: str
) -> None:
    generic = "import shoal, typing\nT = typing.TypeVar('T')\nclass Generic(Good, typing.Generic[T]): ...\n"
    decorated = f"import functools\n@functools.lru_cache\ndef mlp() -> {annotation}:\n    return Good(1)\n"
    assert load_program(f"{module(_GOOD + generic + decorated)}:mlp", {}).variables()


@pytest.mark.parametrize(
    ("factory", "settings", "said"),
    [
        (
            "classifier",
            {"hiddn": 3},
            r"unexpected keyword argument 'hiddn'; the factory is classifier\(hidden: int = 4\) -> .*Good",
        ),
        ("regressor", {}, r"missing a required argument: 'depth'.*the settings are none"),
    ],
)
def test_settings_that_do_not_fit_show_the_signature(
    module: Callable[[str], str], factory: str, settings: Mapping[str, int], said: str
) -> None:
    with pytest.raises(errors.ProgramError, match=said):
        load_program(f"{module(_GOOD)}:{factory}", settings)


def test_a_factory_that_raises(module: Callable[[str], str]) -> None:
    name = module("import shoal\ndef mlp() -> shoal.Program:\n    raise OSError('no data here')\n")
    with pytest.raises(errors.ProgramError, match=r"the factory raised OSError: no data here[\s\S]*in mlp"):
        load_program(f"{name}:mlp", {})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", r"no method variables\(\)"),
        ("variables = lambda self: {}", r"no method loss_and_gradients\(\)"),
        ("variables = loss_and_gradients = lambda *a: {}", "no attribute `dataset`; set it to None"),
        ("dataset = 3; variables = loss_and_gradients = lambda *a: {}", "is a int without __len__ and batch"),
        (
            "dataset = property(lambda self: 1 / 0); variables = loss_and_gradients = lambda *a: {}",
            "`dataset` raised ZeroDivisionError",
        ),
    ],
)
def test_a_factory_must_return_a_program(module: Callable[[str], str], body: str, said: str) -> None:
    name = module(f"class mlp:\n    {body}\n")
    with pytest.raises(errors.ProgramError, match=said):
        load_program(f"{name}:mlp", {})


def test_blame_keeps_the_cause() -> None:
    def inner() -> None:
        raise KeyError("w")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise ValueError("no weights") from error

    with (
        pytest.raises(errors.ProgramError, match=r"loss raised ValueError: no weights[\s\S]*KeyError: 'w'"),
        as_program_error("loss"),
    ):
        outer()


def test_a_worker_adds_its_share_of_the_change_of_an_average() -> None:
    described: dict[str, Variable | np.ndarray] = {
        "w": np.ones(2),
        "mean": Variable.of(np.zeros(2), trainable=False, aggregation="mean"),
        "seen": Variable((), "int64", trainable=False, aggregation="sum"),
        "last": Variable(2, trainable=False),
    }
    placed = summed(described, Asynchronous())
    assert summed(described, Synchronous()) == described
    assert placed["mean"] == Variable(2, "float64", Given(), trainable=False, aggregation="sum")
    assert {name: it for name, it in placed.items() if name != "mean"} == {
        name: it for name, it in described.items() if name != "mean"
    }
    known = {name: it for name, it in placed.items() if isinstance(it, Variable)}
    increments = Increments(described, known, workers=4)
    params = {"mean": np.array([1.0, 2.0]), "seen": np.array(7), "last": np.ones(2), "w": np.ones(2)}
    found = increments.of({"mean": np.array([3.0, 2.0]), "last": np.zeros(2)}, params)
    assert {name: it.tolist() for name, it in found.items()} == {"mean": [0.5, 0], "seen": 0, "last": [0, 0]}
    assert {name: it.tolist() for name, it in increments.of({"seen": np.array(1)}, params).items()} == {
        "seen": 1,
        "mean": [0, 0],
    }
    assert increments.of({"mean": np.ones(3)}, params)["mean"].shape == (3,)
    assert increments.of({}, params) == {}
    averaged = {name: it for name, it in described.items() if isinstance(it, Variable)}
    assert Increments(described, averaged, workers=4).of({"mean": np.ones(2)}, params)["mean"].tolist() == [1, 1]


def test_a_step_has_no_updates_unless_given() -> None:
    step = StepOutput(1.0, {})
    assert (step.updates, step.metrics) == ({}, {})

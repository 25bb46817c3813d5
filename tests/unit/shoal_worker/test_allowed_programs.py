"""Allowed programs of a worker: they are found without running any of their code."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import errors
from shoal_worker.allowed_programs import AllowedPrograms

TRAP = "raise SystemExit('this module was imported')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of programs. None of its modules may be imported."""
    programs = tmp_path / "programs"
    (programs / "vision" / "models").mkdir(parents=True)
    (programs / "spread" / "deep").mkdir(parents=True)
    for module in ("flowers", "vision/__init__", "vision/models/__init__", "vision/models/resnet", "spread/deep/one"):
        (programs / f"{module}.py").write_text(TRAP)
    (programs / "numpy").mkdir()
    (programs / "numpy" / "linalg.py").write_text(TRAP)
    (programs / "subprocess.py").write_text(TRAP)
    return programs


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python searches, but which is not under --path."""
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "installed_models.py").write_text(TRAP)
    monkeypatch.syspath_prepend(installed)
    return installed


@pytest.mark.parametrize("module", ["flowers", "vision", "vision.models", "vision.models.resnet", "spread.deep.one"])
def test_modules_under_the_path_are_allowed_without_an_import(folder: Path, module: str) -> None:
    AllowedPrograms([str(folder)]).check(f"{module}:f")
    assert module.partition(".")[0] not in sys.modules


@pytest.mark.parametrize("program", ["subprocess:run", "os:system", "builtins:eval", "os.path:join", "sys:exit"])
@pytest.mark.parametrize("patterns", [(".", "shoal_nn"), ("*",)])
def test_the_standard_library_is_never_allowed(folder: Path, program: str, patterns: tuple[str, ...]) -> None:
    with pytest.raises(errors.ProgramNotAllowed, match="standard library, which has no programs"):
        AllowedPrograms([str(folder)], patterns).check(program)


def test_a_module_elsewhere_is_refused_with_its_file_and_what_to_do(folder: Path, elsewhere: Path) -> None:
    with pytest.raises(errors.ProgramNotAllowed) as refused:
        AllowedPrograms([str(folder)]).check("installed_models:Model")
    message = refused.value.message
    assert f"installed_models is {elsewhere / 'installed_models.py'}, which is not under --path ({folder})" in message
    assert "--allow-program" in message
    assert "installed_models" not in sys.modules


@pytest.mark.parametrize("module", ["numpy", "numpy.linalg", "shoal.client", "shoal_worker.trainer", "yaml"])
def test_installed_packages_are_refused_even_if_a_folder_of_the_path_has_their_name(folder: Path, module: str) -> None:
    with pytest.raises(errors.ShoalError) as refused:
        AllowedPrograms([str(folder)]).check(f"{module}:f")
    assert refused.value.code in {"PROGRAM_NOT_ALLOWED", "PROGRAM_ERROR"}


def test_a_loaded_module_of_the_same_name_is_another_one(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "installed_models.py").write_text(TRAP)
    allowed = AllowedPrograms([str(folder)])
    allowed.check("installed_models:Model")
    loaded = type(sys)("installed_models")
    loaded.__spec__ = None
    monkeypatch.setitem(sys.modules, "installed_models", loaded)
    with pytest.raises(errors.ProgramNotAllowed):
        allowed.check("installed_models:Model")


def test_a_module_that_does_not_exist_is_named_with_the_folders(folder: Path) -> None:
    with pytest.raises(errors.ProgramError, match=r"No module named 'vision\.nothing' in the folders of --path \(/"):
        AllowedPrograms([str(folder)]).check("vision.nothing:mlp")


def test_a_module_with_the_suffix_of_its_file_gets_the_right_name(folder: Path) -> None:
    (folder / "ratings.py").write_text(TRAP)
    with pytest.raises(
        errors.ProgramError, match=r"No module named 'ratings\.py' .*; leave out \.py: ratings:Ratings$"
    ):
        AllowedPrograms([str(folder)]).check("ratings.py:Ratings")


@pytest.mark.parametrize(
    ("pattern", "program"),
    [
        ("installed_models", "installed_models:Model"),
        ("installed_models", "installed_models.deep:Model"),
        ("installed_*", "installed_models:Model"),
        ("installed_models:Model", "installed_models:Model"),
        ("*:Model", "installed_models:Model"),
        ("shoal_nn", "shoal_nn.programs:image_classifier"),
    ],
)
def test_patterns_allow_modules_and_factories(folder: Path, pattern: str, program: str) -> None:
    AllowedPrograms([str(folder)], [pattern]).check(program)


@pytest.mark.parametrize(
    ("pattern", "program"),
    [
        ("installed_models:Model", "installed_models:Other"),
        ("installed_models", "installed_models_2:Model"),
        ("shoal_nn.programs", "digits:Digits"),
    ],
)
def test_patterns_replace_the_default(folder: Path, elsewhere: Path, pattern: str, program: str) -> None:
    with pytest.raises(errors.ProgramNotAllowed, match=f"this worker allows {pattern}"):
        AllowedPrograms([str(folder)], [pattern]).check(program)


@pytest.mark.parametrize(
    ("pattern", "submitter", "program"),
    [
        ("alice=installed_models", "alice", "installed_models.deep:Model"),
        ("alice=installed_models:Model", "alice", "installed_models:Model"),
        ("alice@example.org=installed_*", "alice@example.org", "installed_models:Model"),
        ("alice=.", "alice", "flowers:f"),
        ("shoal_nn", "alice", "shoal_nn.programs:image_classifier"),
    ],
)
def test_a_pattern_of_a_submitter_allows_its_own_jobs_only(
    folder: Path, pattern: str, submitter: str, program: str
) -> None:
    allowed = AllowedPrograms([str(folder)], [pattern])
    allowed.check(program, submitter)
    if "=" in pattern:
        for other in ("bob", "", "alic", "Alice", "*"):
            with pytest.raises(errors.ProgramNotAllowed, match="this worker allows no programs"):
                allowed.check(program, other)


def test_a_pattern_of_an_access_role_allows_jobs_of_this_role_only(folder: Path) -> None:
    allowed = AllowedPrograms([str(folder)], ["@admin=installed_models", "@submitter=flowers", "ann=shoal_nn"])
    allowed.check("installed_models:Model", "root", "admin")
    allowed.check("flowers:f", "ann", "submitter")
    allowed.check("shoal_nn.programs:image_classifier", "ann", "submitter")
    for submitter, role in (("ann", "submitter"), ("admin", ""), ("@admin", ""), ("@admin", "submitter"), ("", "")):
        with pytest.raises(errors.ProgramNotAllowed):
            allowed.check("installed_models:Model", submitter, role)
    with pytest.raises(errors.ProgramNotAllowed, match=r"to jobs of root \(admin\)"):
        allowed.check("flowers:f", "root", "admin")


@pytest.mark.parametrize("role", ["@", "@reader", "@Admin", "@*"])
def test_an_access_role_that_submits_no_jobs_is_refused_when_the_worker_starts(role: str) -> None:
    with pytest.raises(errors.BadRequest, match="submits no jobs; use one of: @admin, @submitter"):
        AllowedPrograms([], [f"{role}=vision"])


@pytest.mark.parametrize(
    "pattern", ["", "./programs", "a b", "vision\n", "x" * 257, "=vision", "alice=", "alice=bob=vision"]
)
def test_a_pattern_is_checked_when_the_worker_starts(pattern: str) -> None:
    with pytest.raises(errors.BadRequest, match="--allow-program"):
        AllowedPrograms([], [pattern])


def test_a_new_file_is_found_at_once(folder: Path) -> None:
    allowed = AllowedPrograms([str(folder)])
    write: Callable[[str], int] = (folder / "later.py").write_text
    with pytest.raises(errors.ProgramError):
        allowed.check("later:f")
    write(TRAP)
    allowed.check("later:f")

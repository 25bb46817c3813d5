"""`shoal examples`: the list, and copies."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal._cli.app import app

FOLDER = Path(__file__).parents[4] / "examples"
EXAMPLES = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("distribute/*.py")], key=lambda path: path.name)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["examples", *arguments])


def test_are_listed_with_their_purpose(run: Callable[..., Result]) -> None:
    lines = run().stdout.splitlines()
    assert len({path.name for path in EXAMPLES}) == len(EXAMPLES)
    assert [line.split()[0] for line in lines[1:-1]] == [path.name for path in EXAMPLES]
    assert "classifies handwritten digits" in next(line for line in lines if line.startswith("digits.py"))


@pytest.mark.parametrize("name", ["digits", "digits.py"])
def test_are_copied_and_never_overwrite(run: Callable[..., Result], tmp_path: Path, name: str) -> None:
    assert run(name).stdout == "wrote digits.py\nwrote digits.npz\n"
    assert (tmp_path / "digits.py").read_text() == next(it.read_text() for it in EXAMPLES if it.name == "digits.py")
    (tmp_path / "digits.py").write_text("mine")
    again = run(name)
    assert again.exit_code == 2
    assert "digits.py exists, and is not overwritten" in again.stderr
    assert (tmp_path / "digits.py").read_text() == "mine"


def test_all_are_copied_to_a_new_folder(run: Callable[..., Result], tmp_path: Path) -> None:
    assert run("--all", "--to", "a/b").exit_code == 0
    copied = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert copied == sorted([*(path.name for path in EXAMPLES), "digits.npz"])


def test_are_copied_with_the_examples_and_the_data_that_they_need(run: Callable[..., Result], tmp_path: Path) -> None:
    run("fine_tuning")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.py", "digits.npz", "fine_tuning.py"]
    run("mirrored", "--to", "strategies")
    assert sorted(path.name for path in (tmp_path / "strategies").iterdir()) == ["mirrored.py", "resnet.py"]


def test_an_unknown_one_gets_the_names(run: Callable[..., Result]) -> None:
    result = run("digit")
    assert result.exit_code == 2
    assert (
        "there is no example 'digit'; choose one of: central_storage.py, curves.py, custom_loop.py, demo.py, digits.py"
        in result.stderr
    )

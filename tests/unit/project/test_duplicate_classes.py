"""Lint for names of classes and types that are defined twice, on small samples."""

from pathlib import Path

import pytest
from lint.duplicate_classes import duplicates, main, names_in_glossary, problems

GLOSSARY = """# Glossary

## Names that two packages define

| class | why |
| --- | --- |
| `Lane`, `Port` | both ends |

## Model

| `Arena` | a run |
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "client/shoal/lane.py": "class Lane: ...\nclass Arena: ...\n",
        "client/shoal/v1/lane_pb2.py": "class Arena: ...\n",
        "server/shoal_server/lane.py": "if 1:\n class Lane: ...\ndef f():\n class _Port: ...\n class Run: ...\n",
        "worker/shoal_distribute/keras/lane.py": "class Lane: ...\nclass Run: ...\n__all__ = ['Lane', 'Run']\n",
        "worker/shoal_distribute/keras/steps/loop.py": "class Run: ...\n__all__ = ['Run']\n",
        "worker/shoal_worker/port.py": "class _Port:\n    class Run: ...\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_duplicates_leave_out_generated_code_the_names_of_keras_and_private_classes_in_functions(tree: Path) -> None:
    assert duplicates(tree) == {
        "Lane": ["client/shoal/lane.py:1", "server/shoal_server/lane.py:2"],
        "Run": ["server/shoal_server/lane.py:5", "worker/shoal_worker/port.py:2"],
    }


def test_names_of_the_keras_front_count_unless_it_exports_them(tree: Path) -> None:
    inner = tree / "worker/shoal_distribute/keras/steps"
    (inner / "loop.py").write_text("class Arena: ...\nclass Dense: ...\n__all__ = ['Arena', 'Dense']\n")
    (inner / "__init__.py").write_text("__all__ = ['Dense']\n")
    (tree / "worker/dense.py").write_text("class Dense: ...\n")
    found = duplicates(tree)
    assert found["Arena"] == ["client/shoal/lane.py:2", "worker/shoal_distribute/keras/steps/loop.py:1"]
    assert "Dense" not in found


def test_public_aliases_count_but_no_type_variables_and_no_options(tree: Path) -> None:
    (tree / "server/aliases.py").write_text(
        "Arena = dict[str, int]\nPath: TypeAlias = str\n_Arena = LANE = 1\n"
        "Run = TypeVar('Run')\nLane = Annotated[str, 1]\n"
    )
    (tree / "server/path.py").write_text("class Path: ...\ndef f():\n Arena = 1\nLANE = 2\n")
    found = duplicates(tree)
    assert found.keys() == {"Arena", "Lane", "Path", "Run"}
    assert found["Arena"] == ["client/shoal/lane.py:2", "server/aliases.py:1"]
    assert found["Path"] == ["server/aliases.py:2", "server/path.py:1"]
    assert len(found["Lane"]) == len(found["Run"]) == 2


def test_the_glossary_has_names_in_the_first_column_of_one_section() -> None:
    assert names_in_glossary(GLOSSARY) == {"Lane", "Port"}
    assert names_in_glossary("# Glossary\n") == set()


def test_problems_are_unknown_names_too_many_names_and_rows_that_are_out_of_date() -> None:
    found = {"Lane": ["a.py:1", "b.py:2"], "Run": ["a.py:3", "b.py:4"]}
    assert problems(found, {"Lane", "Run"}) == []
    unknown, stale = problems(found, {"Lane", "Port"})
    assert unknown.startswith("a.py:3, b.py:4: Run is defined 2 times")
    assert "Port, which is not defined twice" in stale
    (many,) = problems(found, {"Lane", "Run"}, most=1)
    assert many.startswith("2 names")


def test_the_command_fails_until_the_glossary_has_all_names_and_lists_them_at_any_time(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], tree) == 1
    assert main(["--list"], tree) == 0
    assert "Run: server/shoal_server/lane.py:5, worker/shoal_worker/port.py:2\n" in capsys.readouterr().out
    (tree / "docs/explanation").mkdir(parents=True)
    (tree / "docs/explanation/glossary.md").write_text(GLOSSARY.replace("`Port`", "`Run`"))
    assert main([], tree) == 0

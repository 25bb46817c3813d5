"""Lint for private names in tests, on small samples."""

from pathlib import Path

import pytest
from lint.private_names import findings, main


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("client/shoal/_wire/chunks.py", "client/shoal/_numbers.py", "tests/test_it.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from shoal._wire.chunks import _HEADER", "_HEADER"),
        ("from library.registry import public, _registry as registry", "_registry"),
        ("import library._core", "_core"),
        ("monkeypatch.setattr(chunks, '_LIMIT_S', 1)", "_LIMIT_S"),
        ("monkeypatch.setattr('shoal._wire.chunks._LIMIT_S', 1)", "_LIMIT_S"),
        ("monkeypatch.delattr(chunks, '_LIMIT_S')", "_LIMIT_S"),
        ("monkeypatch.setattr('library._core.Server.stop', stop)", "_core"),
        ("mock.patch.object(Lane, '_send')", "_send"),
        ("mock.patch('shoal.job._Field', Field)", "_Field"),
        ("getattr(lane, '_socket')", "_socket"),
        ("vars(event)['_cond']", "_cond"),
        ("event.__dict__['_cond']", "_cond"),
    ],
)
def test_private_name_of_another_module_is_found(tree: Path, line: str, name: str) -> None:
    assert [*findings(f"x = 1\n{line}\n", tree)] == [(2, name)]


@pytest.mark.parametrize(
    "line",
    [
        "from shoal import _wire, _numbers",
        "from shoal._wire.chunks import Chunk",
        "monkeypatch.setattr('shoal._wire.chunks.LIMIT_S', 1)",
        "monkeypatch.setattr(module, '__file__', 1)",
        "getattr(module, name, '_default')",
        "name.endswith('_total')",
        "monkeypatch.setattr('library._core.Server.stop', stop)  # private: it has no other",
    ],
)
def test_other_names_are_not_found(tree: Path, line: str) -> None:
    assert [*findings(line, tree)] == []


def test_command_names_the_file_and_fails(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tree) == 0
    (tree / "tests/test_it.py").write_text("\nfrom shoal import _secret\n")
    assert main([], tree) == 1
    assert capsys.readouterr().out.startswith("tests/test_it.py:2: _secret is private to its module")

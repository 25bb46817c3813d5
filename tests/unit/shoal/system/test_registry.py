"""Registry: it finds the entries that installed packages declare, and names a package that cannot be loaded."""

import builtins
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal import errors
from shoal._system import Registry


@dataclass
class Factory:
    name: str = "declared"
    version: int = 1


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry[Factory]]:
    """Puts a package with these entry points on the path."""

    def installed(entries: str, code: str = "") -> Registry[Factory]:
        metadata = tmp_path / "pigeon-2.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 2.1\n")
        (metadata / "entry_points.txt").write_text(f"[shoal.tests]\n{entries}\n")
        (tmp_path / "pigeon.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pigeon", raising=False)
        return Registry("shoal.tests")

    return installed


CODE = """
class Factory:
    name = "declared"
"""


def test_an_installed_package_adds_to_every_process(install: Callable[..., Registry[Factory]]) -> None:
    registry = install("declared = pigeon:Factory", CODE)
    assert [it.name for it in registry.items()] == ["declared"]


def test_program_replaces_and_removes_an_entry_of_a_package(install: Callable[..., Registry[Factory]]) -> None:
    registry = install("declared = pigeon:Factory", CODE)
    registry.register(Factory(version=2))
    assert [(it.name, it.version) for it in registry.items()] == [("declared", 2)]
    registry.unregister("declared")
    registry.unregister("declared")
    assert registry.items() == []


def test_a_module_may_register_while_it_is_loaded(
    install: Callable[..., Registry[Factory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = install(
        "declared = pigeon:Factory", f"import builtins\nbuiltins.registry.register(builtins.dove)\n{CODE}"
    )
    monkeypatch.setattr(builtins, "registry", registry, raising=False)
    monkeypatch.setattr(builtins, "dove", Factory("dove"), raising=False)
    assert {it.name for it in registry.items()} == {"declared", "dove"}


@pytest.mark.parametrize(
    ("entry", "code", "reason"),
    [
        ("x = dove:Factory", "", "ModuleNotFoundError: No module named 'dove'"),
        ("x = pigeon:Factory", "", "AttributeError"),
        ("x = pigeon:Factory", "def Factory():\n    raise OSError('no carrier')", "OSError: no carrier"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named_each_time(
    install: Callable[..., Registry[Factory]], entry: str, code: str, reason: str
) -> None:
    registry = install(entry, code)
    for _ in range(2):
        with pytest.raises(errors.StartFailed, match=rf"x of pigeon 2\.1 .* cannot be loaded: {reason}.*; repair or"):
            registry.items()

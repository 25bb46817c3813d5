"""Machine code that environments of a user share: the second one compiles nothing, and code of others is not loaded."""

import fcntl
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from numba import types
from packaging.version import Version

from shoal._numerics import kernels, shared_kernels

TWICE = """
import numba

@numba.njit(cache=True)
def twice(x):
    return x + x
"""
NUMBERS = [(types.int64,), (types.float64,)]


def environment(folder: Path, source: str = TWICE) -> Any:
    """Returns the kernel of a new environment, whose cache is empty."""
    folder.mkdir()
    path = folder / "twice.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("twice", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def prepared(kernel: Any, home: dict[str, str]) -> list[str]:
    """Prepares a kernel as a server does. Returns a word for each time that it says that it compiles."""
    told: list[str] = []
    shared = shared_kernels.shared_folder(kernel, home)
    kernels.prepare(kernel, NUMBERS, shared=shared, on_compile=lambda: told.append("compiles"))
    assert kernel(3) == 6
    return told


@pytest.mark.skipif(Version(version("numba")) < Version("0.68"), reason="earlier ones compile a copied source again")
def test_a_second_environment_compiles_nothing(tmp_path: Path, home: dict[str, str]) -> None:
    assert prepared(environment(tmp_path / "one"), home) == ["compiles"]
    second = environment(tmp_path / "two")
    assert prepared(second, home) == []
    assert not second.stats.cache_misses
    assert sum(second.stats.cache_hits.values()) == len(NUMBERS)


def test_a_wait_for_another_process_that_compiles_is_told_once(
    tmp_path: Path, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TOLD_AFTER_S", 0.0)
    kernel, told = environment(tmp_path / "one"), list[str]()
    shared = shared_kernels.shared_folder(kernel, home)
    assert shared is not None
    other = os.open(shared, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def tell() -> None:
        told.append("waits")
        os.close(other)  # which releases the lock

    kernels.prepare(kernel, NUMBERS[:1], shared=shared, on_wait=tell)
    assert told == ["waits"]


def test_an_environment_with_a_cache_gives_its_code(tmp_path: Path, home: dict[str, str]) -> None:
    first = environment(tmp_path / "one")
    kernels.prepare(first, NUMBERS)
    again = importlib.util.spec_from_file_location("twice", tmp_path / "one" / "twice.py")
    assert again is not None
    assert again.loader is not None
    module = importlib.util.module_from_spec(again)
    again.loader.exec_module(module)
    assert prepared(module.twice, home) == []
    assert prepared(environment(tmp_path / "two"), home) == []


def test_other_code_is_compiled_and_few_versions_are_kept(tmp_path: Path, home: dict[str, str]) -> None:
    for number in range(shared_kernels.MOST_VERSIONS + 2):
        kernel = environment(tmp_path / str(number), f"{TWICE}# {number}\n")
        assert prepared(kernel, home) == ["compiles"]
    assert len(list((tmp_path / "cache" / "shoal" / "kernels").iterdir())) == shared_kernels.MOST_VERSIONS


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, home: dict[str, str]) -> None:
    kernel = environment(tmp_path / "one")
    folder = shared_kernels.shared_folder(kernel, home)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    assert shared_kernels.shared_folder(kernel, home) is None
    folder.chmod(0o500)
    if os.geteuid():  # root can write everywhere
        assert prepared(kernel, home) == ["compiles"]


def test_without_a_place_or_with_another_cache_nothing_is_shared(tmp_path: Path) -> None:
    kernel = environment(tmp_path / "one")
    (tmp_path / "file").touch()
    for environ in ({"XDG_CACHE_HOME": str(tmp_path / "file")}, {"NUMBA_CACHE_DIR": "x", "XDG_CACHE_HOME": "y"}):
        assert shared_kernels.shared_folder(kernel, environ) is None

"""Cached machine code of kernels: levels of processors, a read-only folder, and caches that processes share."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
from numba import types
from typer.testing import CliRunner

from shoal import errors
from shoal._cli.app import app
from shoal._numerics import kernels
from support.run_lengths import long_only

FLAGS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


def cpuinfo(*levels: str) -> str:
    return "processor : 0\nflags\t\t: fpu " + " ".join(FLAGS[level] for level in levels) + "\n\nprocessor : 1\n"


@pytest.mark.parametrize(
    ("machine", "text", "level"),
    [
        ("x86_64", cpuinfo(), ""),
        ("x86_64", cpuinfo("x86-64-v2"), "x86-64-v2"),
        ("x86_64", cpuinfo("x86-64-v2", "x86-64-v3"), "x86-64-v3"),
        ("x86_64", cpuinfo(*FLAGS), "x86-64-v4"),
        ("x86_64", cpuinfo("x86-64-v2", "x86-64-v4"), "x86-64-v2"),  # as where a hypervisor hides AVX2
        ("x86_64", "", ""),
        ("aarch64", "Features : fp asimd", "generic"),
        ("riscv64", "", ""),
    ],
)
def test_the_level_of_a_processor(machine: str, text: str, level: str) -> None:
    assert kernels.level_of(machine, text) == level


def test_without_a_folder_numba_is_left_alone(tmp_path: Path) -> None:
    for environ in ({}, {"SHOAL_KERNELS": str(tmp_path / "none")}):
        before = dict(environ)
        with kernels.precompiled(environ) as level:
            assert level == ""
            assert environ == before


def test_cache_folder_of_the_environment_is_used(tmp_path: Path) -> None:
    for each in kernels.levels():
        (tmp_path / each).mkdir()
    environ = {"SHOAL_KERNELS": str(tmp_path), "NUMBA_CACHE_DIR": "/elsewhere"}
    with kernels.precompiled(environ) as level:
        assert level == ""
        assert environ["NUMBA_CACHE_DIR"] == "/elsewhere"


@pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
def test_roles_without_kernels_leave_numba_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    level = kernels.level_of(os.uname().machine, Path("/proc/cpuinfo").read_text())
    if not level:
        pytest.skip("this processor has none of the levels")
    (tmp_path / level).mkdir()
    for name in ("NUMBA_CPU_NAME", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    monkeypatch.setattr(
        "shoal._role.lifecycle.run_role", lambda *_, **__: told.append(os.environ.get("NUMBA_CPU_NAME", ""))
    )
    monkeypatch.setattr(
        "shoal._role.lifecycle.configure_logging", lambda *_, **__: None
    )  # to a file that the runner closes
    ran = CliRunner().invoke(app, [role], env={"SHOAL_KERNELS": str(tmp_path), "SHOAL_STORE": "memory"})
    assert ran.exit_code == 0, ran.output
    assert told == ["" if role == "coordinator" else level]
    assert "NUMBA_CPU_NAME" not in os.environ


def test_a_level_that_this_machine_makes_no_code_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BadRequest, match=r"x86-64-v9.*use one of: "):
        kernels.precompile(tmp_path, "x86-64-v9")


def test_failed_compilation_names_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('no compiler')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(errors.StartFailed, match="no compiler"):
        kernels.precompile(tmp_path, kernels.levels()[0])


# In a process of its own, as the environment is read when Numba is imported.
LOAD = """
import sys
from shoal._numerics import kernels
with kernels.precompiled() as level:
    from numba.core.event import install_recorder
    with install_recorder("numba:compile") as compiled:
        kernels.compile_all("shoal.kernels")
    from shoal_server.optimizers.compilation import processor
    assert processor() == level, processor()
    print(level, len(compiled.buffer))
"""


# It compiles all kernels, which takes ten seconds. `make e2e` does it as well, when it builds the image.
@long_only
@pytest.mark.timeout(300)
def test_a_role_takes_the_code_from_a_folder_that_it_cannot_write_to(tmp_path: Path) -> None:
    level = kernels.level_of(os.uname().machine, Path("/proc/cpuinfo").read_text())
    if not level:
        pytest.skip("this processor has none of the levels")
    kernels.precompile(tmp_path, level)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**environ, "SHOAL_KERNELS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == [level, "0"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


TWICE = """
import numba

@numba.njit(cache=True)
def twice(x):
    return x + x
"""
NUMBERS = [(types.int64,), (types.float64,)]


def twice(folder: Path) -> Any:
    """The kernel as a new process has it."""
    path = folder / "twice.py"
    if not path.exists():
        path.write_text(TWICE)
    spec = importlib.util.spec_from_file_location("twice", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.twice


@pytest.mark.parametrize("winner", [0, 1])
def test_a_cache_that_two_processes_have_mixed_up_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner: int
) -> None:
    """One file for the code of two types: a process that loads it for the other type has it twice, and calls fail."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # beside the source
    first = twice(tmp_path)
    kernels.prepare(first, NUMBERS)
    files = sorted(Path(first.stats.cache_path).glob("*.nbc"))
    assert len(files) == 2
    shutil.copyfile(files[winner], files[1 - winner])
    for misses in (2, 0):  # the second finds the cache mended
        kernel = twice(tmp_path)
        kernels.prepare(kernel, NUMBERS)
        assert sum(kernel.stats.cache_misses.values()) == misses
        kernel.disable_compile()
        assert (kernel(21), kernel(0.25)) == (42, 0.5)


class FakeKernel:
    """A kernel that records whether its cache is locked while it compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stats = SimpleNamespace(cache_path=str(folder))
        self.py_func = cpuinfo  # any function: its cache is empty
        self.signatures: list[Any] = []
        self.alone: list[bool] = []

    def compile(self, signature: Any) -> None:
        self.signatures.append(signature)
        self.alone.append(not is_free(self.folder))


def is_free(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a cache, as another process does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def test_one_process_at_a_time_uses_a_cache(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path)
    kernels.prepare(kernel, NUMBERS)
    assert kernel.alone == [True, True]
    assert is_free(tmp_path)


def test_cache_lock_held_forever_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LOCK_S", 0.0)
    kernel = FakeKernel(tmp_path)
    with locked(tmp_path):
        kernels.prepare(kernel, NUMBERS)
    assert sorted(kernel.signatures, key=str) == sorted(NUMBERS, key=str)


def test_cache_that_cannot_be_locked_is_used_without_a_lock(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.stats.cache_path = str(tmp_path / "none")
    kernels.prepare(kernel, NUMBERS)
    assert kernel.alone == [False, False]


def test_complete_cache_needs_no_lock(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.signatures = [*NUMBERS]
    with locked(tmp_path):  # a process that wants the lock waits for a minute
        kernels.prepare(kernel, NUMBERS)
    assert not kernel.alone

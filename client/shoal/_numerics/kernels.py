"""Precompiled kernels for each processor level, so that processes in a container start without compiling.

A processor level is a set of instructions that many processors share, such as x86-64-v3. Numba compiles for the
processor that it runs on, and caches the code for that processor only. But a container image is built on one host and
runs on others. `precompile` therefore compiles the code for each level. If SHOAL_KERNELS names the folder of that code,
`precompiled` makes a role use the highest level that its host supports. Kernels are bound by memory, so code for a
level is as fast as code for the exact processor (docs/decisions/0035-kernels-in-the-image.md).

This module does not know the kernels. A package with kernels registers a function in the entry point group
`shoal.kernels`. The function compiles the package's kernels, each by `prepare`. It must not run them, because they are
also compiled for higher levels than that of this processor.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal import errors
from shoal._numerics import shared_kernels

VARIABLE = "SHOAL_KERNELS"
GROUP = "shoal.kernels"

# The flags in /proc/cpuinfo that each level adds to the one before (x86-64 psABI, 3.1.1).
_X86: Mapping[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
}
_ARM = "generic"  # ARMv8-A has NEON; LLVM has no common names for higher levels
_COMPILE = f"from shoal._numerics import kernels; kernels.compile_all({GROUP!r})"
_COMPILE_S = 600.0
LOCK_S = 60.0  # longer than the compilation of all kernels takes
_POLL_S = 0.01
TOLD_AFTER_S = 1.0  # a process that only loads code holds the lock for less


def levels(machine: str = "") -> tuple[str, ...]:
    """Returns the levels that an architecture can compile for, lowest first. The default is this machine's."""
    return {"x86_64": tuple(_X86), "aarch64": (_ARM,)}.get(machine or platform.machine(), ())


def level_of(machine: str, cpuinfo: str) -> str:
    """Returns the highest level that a processor supports, or an empty string if it supports none.

    Args:
        machine: the architecture, as from `platform.machine`.
        cpuinfo: the text of /proc/cpuinfo.
    """
    if machine == "aarch64":
        return _ARM
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    flags, found = set(line.partition(":")[2].split()), ""
    for level in levels(machine):
        if not _X86[level] <= flags:
            break
        found = level
    return found


@contextmanager
def precompiled(environ: MutableMapping[str, str] = os.environ) -> Iterator[str]:
    """Makes Numba, which must be imported inside the block, use the code in SHOAL_KERNELS. Yields its level.

    Numba rejects a cache folder that it cannot write to, and the folder in an image is read-only. So Numba gets a copy
    of one or two megabytes, which is removed at the end of the block. The setting is in the environment, so child
    processes, such as trainers, inherit it.

    The level is an empty string in three cases: SHOAL_KERNELS is not set, its folder has no code for this host, or the
    environment has other settings of Numba. Numba then compiles as usual.

    Args:
        environ: the environment variables.
    """
    folder = environ.get(VARIABLE, "")
    level = level_of(platform.machine(), _cpuinfo()) if folder else ""
    if not level or not Path(folder, level).is_dir() or {"NUMBA_CPU_NAME", "NUMBA_CACHE_DIR"} & environ.keys():
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="shoal-kernels-") as copy:
        shutil.copytree(Path(folder, level), copy, dirs_exist_ok=True)
        ours = _settings(level, Path(copy))
        environ.update(ours)
        try:
            yield level
        finally:
            for name in ours:
                environ.pop(name, None)


def precompile(folder: Path, level: str) -> None:
    """Compiles all kernels for one level in a child process.

    Args:
        folder: the folder for SHOAL_KERNELS. The code goes to a subfolder of the level's name.
        level: the processor level.

    Raises:
        BadRequest: this machine cannot compile for that level.
        StartFailed: the compiler failed. The message has the end of its output.
    """
    if level not in levels():
        known = ", ".join(levels()) or "none"
        raise errors.BadRequest(f"this machine cannot compile for level {level!r}; use one of: {known}")
    target = folder / level
    target.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-P", "-c", _COMPILE],
        env={**os.environ, **_settings(level, target)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMPILE_S,
        check=False,
    )
    if made.returncode:
        raise errors.StartFailed(
            f"cannot compile the kernels for {level}; end of the output:\n{made.stdout[-4096:].strip()}"
        )


def compile_all(group: str) -> None:
    """Compiles the kernels of all installed packages in this process, for the processor that the environment names."""
    for each in entry_points(group=group):
        each.load()()


def prepare(
    dispatcher: Any,
    signatures: Collection[tuple[Any, ...]],
    *,
    shared: Path | None = None,
    on_compile: Callable[[], object] = lambda: None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Compiles a kernel for the given argument types, or loads it from its cache.

    Numba's cache has no locks. Two processes that save code for different types at the same time, such as two servers
    that start together, may use the same file. One of them then loads the other's code as its own, and a call fails as
    ambiguous ("_explain_ambiguous must raise an exception") or because a definition is missing. So a lock lets one
    process at a time compile. If a cache is already damaged, or its file system has no locks, the kernel's cache is
    emptied and the kernel is compiled again.

    Args:
        dispatcher: the result of `numba.njit(cache=True)`, which may still compile.
        signatures: tuples of the types of all arguments.
        shared: a folder from which the machine code is taken if the cache has none, and to which new code is copied
            (`shared_kernels`). None means none.
        on_compile: called before the kernel is compiled; not called if a cache has its code.
        on_wait: called when another process has used the same cache for a second.
    """
    wanted = set(signatures)
    if wanted.issubset(dispatcher.signatures):
        return
    own = Path(dispatcher.stats.cache_path)
    with _alone(own, on_wait), _alone(shared, on_wait) if shared else nullcontext():
        if shared:
            shared_kernels.take(dispatcher, shared)
        if not any(shared_kernels.files_of(dispatcher, own)):
            on_compile()
        for signature in wanted.difference(dispatcher.signatures):
            dispatcher.compile(signature)
        if missing := wanted.difference(dispatcher.signatures):  # the loaded code has other types
            dispatcher.recompile()
            for signature in missing:
                dispatcher.compile(signature)
        if shared and (dispatcher.stats.cache_misses or not any(shared_kernels.files_of(dispatcher, shared))):
            shared_kernels.give(dispatcher, shared)


@contextmanager
def _alone(folder: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Holds a lock on the folder against other processes and threads, or waits for at most a minute for it."""
    descriptor = -1
    try:
        with suppress(OSError):  # no folder, or no locks in its file system; `prepare` handles the consequences
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            _lock(descriptor, on_wait)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int, on_wait: Callable[[], object]) -> None:
    began, told = time.monotonic(), False
    while (waited := time.monotonic() - began) < LOCK_S:  # limited, because the holder may be stopped
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told and waited >= TOLD_AFTER_S:
                told = True
                on_wait()
            time.sleep(_POLL_S)
    return None


def _settings(level: str, cache: Path) -> dict[str, str]:
    # The level's name implies its features; features of the host are not added.
    return {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(cache)}


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""

"""Machine code that is made ahead, once for each level of processor, so that an image starts without compiling.

Numba compiles for the very processor that it runs on, and keeps the code for that one alone. An image is built on one
host and runs on others: `precompile` makes the code for each level that LLVM knows by name, and where SHOAL_KERNELS
names a folder of it, `precompiled` has a role with kernels use the highest level that its host has. Kernels
wait for memory, so a level is as fast as the host's own name (docs/decisions/0035-kernels-in-the-image.md).

What the kernels are, this module does not know: whoever has some names a function that compiles them in the entry point
group `shoal.kernels`, and compiles each by `prepare`.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shoal import errors

VARIABLE = "SHOAL_KERNELS"
GROUP = "shoal.kernels"

# What /proc/cpuinfo calls the instructions that each level adds to the one before (x86-64 psABI, 3.1.1).
_X86: Mapping[str, frozenset[str]] = {
    "x86-64-v2": frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}),
    "x86-64-v3": frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
}
_ARM = "generic"  # ARMv8-A has NEON, and there is no name above it that all makers follow
_COMPILE = f"from shoal._numerics import kernels; kernels.compile_all({GROUP!r})"
_COMPILE_S = 600.0
_LOCK_S = 60.0  # longer than all kernels take to compile
_POLL_S = 0.01


def levels(machine: str = "") -> tuple[str, ...]:
    """The levels that code can be made for on a machine of this kind, lowest first; by default, on this one."""
    return {"x86_64": tuple(_X86), "aarch64": (_ARM,)}.get(machine or platform.machine(), ())


def level_of(machine: str, cpuinfo: str) -> str:
    """The highest level that a processor has; empty: none.

    Args:
        machine: as `platform.machine` says.
        cpuinfo: what /proc/cpuinfo says.
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
    """Has Numba, which is imported inside the block, take the code that SHOAL_KERNELS has; yields its level.

    Numba takes no folder for a cache that it cannot write to, and an image's is read-only: it gets a copy, of a
    megabyte or two, which goes with the block. Numba is told by the environment, so children of the process are told
    the same: programs that a worker runs, too. Empty: there is no such folder, none for this host, or the environment
    tells Numba otherwise. Then it compiles as ever.
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
    """Compiles all kernels for one level, in a process of its own, into a folder for SHOAL_KERNELS.

    Raises:
        BadRequest: this machine makes no code for that level.
        StartFailed: the compiler failed; the message has the end of what it said.
    """
    if level not in levels():
        known = ", ".join(levels()) or "none"
        raise errors.BadRequest(f"no code can be made here for {level!r}; this machine makes it for: {known}")
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
        raise errors.StartFailed(f"cannot compile the kernels for {level}; it said:\n{made.stdout[-4096:].strip()}")


def compile_all(group: str) -> None:
    """Compiles the kernels of all that is installed, in this process, for what the environment says."""
    for each in entry_points(group=group):
        each.load()()


def prepare(dispatcher: Any, signatures: Collection[tuple[Any, ...]]) -> None:
    """Compiles a kernel for these types of arguments, or loads it from its cache.

    Numba's cache has no locks. Of two processes that save code for different types at once, as servers do that start
    side by side, both may take the same file: one then loads the other's code as its own, and a call fails as ambiguous
    ("_explain_ambiguous must raise an exception") or for want of a definition. So one process at a time gets here; and
    where a cache is like that already, or its file system has no locks, the kernel is compiled anew, its cache emptied.

    Args:
        dispatcher: what `numba.njit(cache=True)` makes; it may still compile.
        signatures: types of all arguments, each.
    """
    wanted = set(signatures)
    if wanted.issubset(dispatcher.signatures):
        return
    with _alone(Path(dispatcher.stats.cache_path)):
        for signature in wanted.difference(dispatcher.signatures):
            dispatcher.compile(signature)
        if missing := wanted.difference(dispatcher.signatures):  # what was loaded for them has other types
            dispatcher.recompile()
            for signature in missing:
                dispatcher.compile(signature)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes and threads out that ask for the same folder; after a minute, no longer."""
    descriptor = -1
    try:
        with suppress(OSError):  # it is gone, or its file system has no locks: `prepare` sees to what that may do
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            _lock(descriptor)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    give_up = time.monotonic() + _LOCK_S
    while time.monotonic() < give_up:  # not for ever: its holder may be stopped
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
    return None


def _settings(level: str, cache: Path) -> dict[str, str]:
    # No further features: what the level's name says is all that there is, whatever the host has.
    return {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(cache)}


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""

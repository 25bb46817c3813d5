"""Setting of the memory allocator: its effect, its switch, and that roles apply it before they load anything large.

The tests use processes of their own, because mallopt's settings cannot be undone.
"""

import json
import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is nothing to set")

# 200 blocks of 8 MiB, four at a time: the page faults that they cost.
FAULTS = """
import resource, shoal
done = shoal.tune_allocator()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def churn(rounds):
    for _ in range(rounds):
        blocks = [b"x" * (8 << 20) for _ in range(4)]
        del blocks
churn(1)
before = faults()
churn(50)
print(int(done), faults() - before)
"""

# Runs a module as `python -m` would, then says in which order it did what matters.
ORDER = """
import json, runpy, sys
seen = []
def watch(event, arguments):
    if event == "ctypes.dlsym" and arguments[1] == "mallopt":
        seen.append("mallopt")
    elif event == "import" and arguments[0] in {"grpc", "numpy", "numba"}:
        seen.append(arguments[0])
    elif event == "_thread.start_new_thread":
        seen.append("thread")
sys.addaudithook(watch)
module, *sys.argv[1:] = sys.argv[1:]
try:
    if module == "import":
        exec(sys.argv[1])
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print()
print(json.dumps(seen))
"""


def python(code: str, *arguments: str, allocator: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, "SHOAL_ALLOCATOR": allocator}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False, env=env
    )


def order_of(*arguments: str, allocator: str = "") -> list[str]:
    done = python(ORDER, *arguments, allocator=allocator)
    assert done.returncode == 0, done.stderr
    seen: list[str] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_large_blocks_are_kept_and_not_faulted_in_again() -> None:
    (tuned, few), (untuned, many) = (
        map(int, python(FAULTS, allocator=allocator).stdout.split()) for allocator in ("tuned", "default")
    )
    assert (tuned, untuned) == (1, 0)
    assert few < many / 20


@pytest.mark.parametrize(
    "process",
    [["shoal", role, "--help"] for role in ("coordinator", "server", "worker")] + [["shoal_worker"]],
    ids=["coordinator", "server", "worker", "trainer"],
)
def test_each_role_sets_it_before_anything_large_is_loaded(process: list[str]) -> None:
    seen = order_of(*process)
    assert seen[0] == "mallopt"
    assert seen.count("mallopt") == 1
    assert "grpc" in seen


def test_the_switch_leaves_it_alone() -> None:
    assert "mallopt" not in order_of("shoal", "server", "--help", allocator="default")


def test_a_library_leaves_its_users_process_alone() -> None:
    assert order_of("import", "import shoal") == []
    seen = order_of("import", "import shoal; shoal.LocalCluster; shoal.Client('127.0.0.1:1').close()")
    assert "grpc" in seen
    assert "mallopt" not in seen


def test_another_word_is_refused_at_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "server"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SHOAL_ALLOCATOR": "jemalloc"},
    )
    assert done.returncode == 2
    assert done.stderr == 'error: SHOAL_ALLOCATOR is \'jemalloc\'; it must be "tuned" or "default"\n'

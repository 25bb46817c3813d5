"""Lock files: they have what pyproject.toml wants, everywhere that Shoal runs. `make lint` checks the real ones."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tools" / "supply_chain"))

import lock_files  # noqa: E402 - tools are no package
import renew_locks  # noqa: E402

HASH = "    --hash=sha256:" + "0" * 64
PROJECT = tomllib.loads("""
[build-system]
requires = ["hatchling>=1.27"]
[project]
name = "shoal"
classifiers = ["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.13"]
dependencies = ["numpy>=2.1,<3"]
[project.optional-dependencies]
data = ["PyArrow>=18"]
dev = ["shoal[data]", "pytest>=9"]
reference = ["torch"]
[dependency-groups]
sbom = ["cyclonedx-bom>=7"]
""")
LOCKED = {
    "base": ("numpy==2.4.6",),
    "data": ("-r base", "pyarrow==26.0.1"),
    "dev": ("-r base", "-r data", "pytest==9.2.0"),
    "build": ("hatchling==1.33.0",),
    "sbom": ("cyclonedx-bom==7.5.0",),
}


def lock_text(*lines: str) -> str:
    return "".join(f"{line}.txt\n" if line.startswith("-r") else f"{line} \\\n{HASH}\n    # via x\n" for line in lines)


def locked(**changes: tuple[str, ...]) -> dict[str, lock_files.LockFile]:
    return {name: lock_files.parse(lock_text(*lines)) for name, lines in {**LOCKED, **changes}.items()}


def test_locks_that_agree_with_the_project() -> None:
    assert lock_files.faults(PROJECT, locked()) == []
    assert {each.name for each in lock_files.closure(locked(), "dev")} == {"numpy", "pyarrow", "pytest"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": ()}, "base.txt lacks numpy"),
        ({"base": ("numpy==1.26.0",)}, "base.txt has numpy 1.26.0; pyproject.toml wants numpy<3,>=2.1"),
        ({"data": ("-r base",)}, "data.txt lacks PyArrow"),
        ({"dev": ("-r base", "pytest==9.2.0")}, "dev.txt includes ('base',), not ('base', 'data')"),
        ({"build": ("hatchling==1.1.0",)}, "build.txt has hatchling 1.1.0"),
        ({"sbom": ()}, "sbom.txt lacks cyclonedx-bom"),
        ({"old": ("six==1.17.0",)}, "old.txt belongs to nothing in pyproject.toml"),
        ({"build": ("hatchling==1.33.0", "pytest==9.1.0")}, "pytest has several versions: ['9.1.0', '9.2.0']"),
        (
            {"base": ("numpy==2.4.6 ; python_full_version < '3.13'",)},
            "does not install numpy for Python 3.13 on x86_64",
        ),
        (
            {"base": ("numpy==2.4.6 ; platform_machine == 'x86_64'",)},
            "does not install numpy for Python 3.11 on aarch64",
        ),
    ],
)
def test_locks_that_disagree(changes: dict[str, Any], said: str) -> None:
    assert said in "\n".join(lock_files.faults(PROJECT, locked(**changes)))


def test_a_lock_file_that_is_missing() -> None:
    files = locked()
    del files["data"]
    assert lock_files.faults(PROJECT, files) == ["there is no requirements/data.txt"]


def test_a_package_that_the_project_no_longer_names() -> None:
    left_over = lock_text("hatchling==1.33.0", "six==1.17.0").replace("# via x", "# via shoal (pyproject.toml)")
    files = {**locked(), "build": lock_files.parse(left_over)}
    assert lock_files.faults(PROJECT, files) == ["requirements/build.txt has six, which pyproject.toml no longer names"]


def test_a_package_that_two_lock_files_have_for_different_environments() -> None:
    files = locked(
        base=("numpy==2.4.6", "pytest==9.2.0 ; sys_platform == 'win32'"), dev=("-r base", "-r data", "pytest==9.2.0")
    )
    assert lock_files.faults(PROJECT, files) == []


@pytest.mark.parametrize(
    "text",
    [
        "--index-url https://example.invalid/simple\n",
        "numpy==2.4.6\n",
        "numpy==2.4.6 \\\n    # via x\n",
        f"numpy>=2.4.6 \\\n{HASH}\n",
        f"numpy @ https://example.invalid/numpy.whl \\\n{HASH}\n",
        f"numpy==2.4.6 \\\n{HASH[:-1]}\n",
        f"numpy==2.4.6 \\\n{HASH}\n" * 2,
    ],
)
def test_a_line_without_a_version_or_a_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a package with a version and a hash|is there twice"):
        lock_files.parse(text)


def test_a_renewed_lock_file_lists_what_the_files_that_it_includes_lack() -> None:
    everything = lock_text("colorama==0.4.6", "numpy==2.4.6", "pytest==9.2.0")
    base = lock_files.parse(lock_text("colorama==0.4.6 ; sys_platform == 'win32'", "numpy==2.4.6"))
    renewed = lock_files.parse(renew_locks.lock_text(everything, base.packages.values(), ("base",)))
    assert renewed.includes == ("base",)
    assert set(renewed.packages) == {"colorama", "pytest"}
    assert renewed.packages["pytest"].lines[1] == HASH

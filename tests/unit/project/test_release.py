"""Contents that a release may have, and what it lacks before it is published. `make release` builds a real one."""

import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT / "tools" / name) for name in ("release", "supply_chain")]

import lock_files  # noqa: E402 - tools are no package
import release  # noqa: E402

TRACKED = {
    "README.md",
    "client/shoal/a.py",
    "client/other.py",
    "server/shoal_server/py.typed",
    "tests/test_a.py",
    "examples/a.py",
}
WHEEL = {
    "shoal/a.py",
    "shoal/_examples/a.py",
    "shoal_server/py.typed",
    "shoal/_system/commit.txt",
    "shoal-0.1.0.dist-info/METADATA",
}
SDIST = TRACKED | {"PKG-INFO", "client/shoal/_system/commit.txt"}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (WHEEL, []),
        (WHEEL - {"shoal_server/py.typed"}, ["the wheel lacks shoal_server/py.typed"]),
        (WHEEL | {"tests/test_a.py"}, ["the wheel has tests/test_a.py, which no commit has"]),
        (WHEEL - {"shoal/_examples/a.py"}, ["the wheel lacks shoal/_examples/a.py"]),
        (WHEEL - {"shoal/_system/commit.txt"}, ["the wheel lacks shoal/_system/commit.txt"]),
    ],
)
def test_a_wheel_has_what_the_packages_have(members: set[str], said: list[str]) -> None:
    assert release.wheel_faults(members, TRACKED) == said


def test_an_sdist_has_what_the_repository_has() -> None:
    assert release.sdist_faults(SDIST, TRACKED) == []
    assert release.sdist_faults(SDIST - {"README.md"} | {"notes.txt"}, TRACKED) == [
        "the sdist lacks README.md",
        "the sdist has notes.txt, which no commit has",
    ]


def test_an_sbom_lists_the_locked_dependencies_and_nothing_else() -> None:
    locked = lock_files.closure(lock_files.read(ROOT / "requirements"), "base")
    here = {name: str(value) for name, value in default_environment().items()}
    components = [{"name": each.name, "version": each.version} for each in locked if each.applies(here)]
    sbom = {"metadata": {"component": {"name": "shoal", "version": "0.2.0"}}, "components": components}
    assert release.sbom_faults(sbom, "0.2.0") == []
    removed = components.pop()
    components.append({"name": "pip", "version": "26.3"})
    assert release.sbom_faults(sbom, "0.3.0") == [
        "the SBOM is not of shoal 0.3.0",
        f"the SBOM lacks {removed['name']} {removed['version']}",
        "the SBOM has pip 26.3, which is not locked",
    ]


def test_what_is_missing_before_it_is_published() -> None:
    headed = "## [Unreleased]\n\n## [0.2.0] - 2027-01-02\n"
    assert release.unready("", headed, "0.2.0", "", {"v0.2.0"}) == []
    unheaded = "## [0.2.0]\n## [0x2.0] - 2027-01-02\n"
    project = 'Homepage = "https://example.invalid/shoal"'
    address, changes, heading, tag = release.unready(project, unheaded, "0.2.0", " M file\n", {"v0.1.0"})
    assert "name the project's address" in address
    assert "commit them" in changes
    assert "no '## [0.2.0] - DATE'" in heading
    assert "no tag v0.2.0" in tag

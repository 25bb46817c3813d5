"""Check of the protos against their baseline: breaking changes, additions, and the conditions for a renewal."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tools" / "protos"))

import baseline  # noqa: E402 - tools are no package

PROTO = """syntax = "proto3";
package a.v1;

enum Color {
  COLOR_UNSPECIFIED = 0;
  RED = 1;
}
message Ask {
  string job = 1;
  repeated uint64 steps = 2;
}
message Reply {}
service Jobs {
  rpc Get(Ask) returns (Reply);
}
"""
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n\n### Breaking\n\n- Old.\n"
BREAKING = CHANGELOG.replace("### Added", "### Breaking\n\n- `Ask.job` is `Ask.name`.\n\n### Added")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "protos" / "a" / "v1"
    folder.mkdir(parents=True)
    (folder / "jobs.proto").write_text(PROTO)
    (tmp_path / "protos" / "buf.yaml").write_text((ROOT / "protos" / "buf.yaml").read_text())
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    assert baseline.renew(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, timeout=60)


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "Change")


def edit(repository: Path, old: str, new: str) -> None:
    path = repository / "protos" / "a" / "v1" / "jobs.proto"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  string job = 1;\n", "", 'field "1" with name "job" on message "Ask" was deleted'),
        ("job = 1", "name = 1", 'Field "1" on message "Ask" changed name from "job" to "name"'),
        ("job = 1", "job = 3", 'field "1" with name "job" on message "Ask" was deleted'),
        ("string job", "bytes job", 'changed type from "string" to "bytes"'),
        ("repeated uint64", "uint64", 'changed cardinality from "repeated" to "optional with implicit presence"'),
        ("message Reply {}", "message Answer {}", 'message "Reply" was deleted'),
        ("  rpc Get(Ask) returns (Reply);\n", "", 'RPC "Get" on service "Jobs" was deleted'),
        (
            "returns (Reply)",
            "returns (stream Reply)",
            'RPC "Get" on service "Jobs" changed from server unary to server',
        ),
        ("RED = 1", "CRIMSON = 1", 'Enum value "1" on enum "Color" changed name from "RED" to "CRIMSON"'),
    ],
)
def test_a_break_is_named_with_its_place(repository: Path, old: str, new: str, said: str) -> None:
    if old == "message Reply {}":
        edit(repository, "returns (Reply)", "returns (Answer)")
    edit(repository, old, new)
    why = baseline.check(repository)
    assert said in why
    assert "protos/a/v1/jobs.proto:" in why
    assert "add a line under '### Breaking'" in why


def test_what_has_not_changed_passes_whatever_its_comments_say(repository: Path) -> None:
    assert baseline.check(repository) == ""
    edit(repository, "message Reply {}", "// Nothing.\nmessage Reply {}")
    assert baseline.check(repository) == ""


def test_an_addition_renews_the_baseline_without_a_reason(repository: Path) -> None:
    edit(repository, "string job = 1;", "string job = 1;\n  string more = 3;")
    assert "additions that protos/baseline.txtpb lacks: run 'make proto-baseline'" in baseline.check(repository)
    assert baseline.renew(repository, additive=True) == ""
    assert baseline.check(repository) == ""
    # An addition that is in the baseline is promised.
    commit(repository)
    edit(repository, "\n  string more = 3;", "")
    assert '"more" on message "Ask" was deleted' in baseline.check(repository)


def test_a_break_renews_the_baseline_only_with_a_new_line_under_breaking(repository: Path) -> None:
    edit(repository, "job = 1", "name = 1")
    assert baseline.renew(repository, additive=True) == ""
    assert 'from "job" to "name"' in baseline.check(repository)
    assert "Add a line that says so under '### Breaking'" in baseline.renew(repository)
    (repository / "CHANGELOG.md").write_text(BREAKING)
    assert baseline.renew(repository) == ""
    assert baseline.check(repository) == ""
    # A line of an earlier commit is no reason for the next break.
    commit(repository)
    edit(repository, "name = 1", "title = 1")
    assert 'from "name" to "title"' in baseline.renew(repository)


def test_protos_that_do_not_compile_are_refused(repository: Path) -> None:
    edit(repository, "message Reply {}", "message Reply {")
    with pytest.raises(SystemExit, match=r"does not compile:\n.*jobs\.proto:"):
        baseline.described(repository / "protos")

"""The baseline of the wire contract: compares `protos/` with `protos/baseline.txtpb`, and renews that file.

    python tools/protos/baseline.py check             # fails if protos/ breaks the baseline or differs from it
    python tools/protos/baseline.py renew             # writes the baseline; a break needs a line in CHANGELOG.md
    python tools/protos/baseline.py renew --additive  # writes the baseline unless protos/ breaks it

`buf breaking` finds breaking changes by the rules in `protos/buf.yaml`. The baseline is text, so that a review shows
what changed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2, text_format

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")

_BREAK = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+:(?P<what>.+)$", re.MULTILINE)
_HEADER = "# The wire contract as of the last `make proto-baseline`; do not edit by hand.\n"


def described(protos: Path) -> descriptor_pb2.FileDescriptorSet:
    """Returns the descriptors of the .proto files in a folder, without comments and positions.

    Raises:
        SystemExit: the files do not compile.
    """
    built = _buf("build", protos, "--exclude-source-info", "-o", "-#format=binpb")
    if built.returncode:
        raise SystemExit(f"{protos} does not compile:\n{built.stderr.decode()}{built.stdout.decode()}")
    found = descriptor_pb2.FileDescriptorSet.FromString(built.stdout)
    for file in found.file:
        file.DiscardUnknownFields()  # buf's own annotations
        for message in file.message_type:
            _drop_json_names(message)
    return found


def _drop_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _drop_json_names(nested)


def to_text(descriptors: descriptor_pb2.FileDescriptorSet) -> str:
    """Returns the text form of a baseline file."""
    return _HEADER + text_format.MessageToString(descriptors)


def breaks(protos: Path, baseline: str) -> list[str]:
    """Returns what in a folder of .proto files breaks a baseline, a line each: file, line, and what changed.

    Args:
        protos: the folder, with its `buf.yaml`.
        baseline: the text form of the baseline.

    Raises:
        SystemExit: buf fails for another reason than a breaking change.
    """
    old = text_format.Parse(baseline, descriptor_pb2.FileDescriptorSet())
    with tempfile.NamedTemporaryFile(suffix=".binpb") as file:
        file.write(old.SerializeToString())
        file.flush()
        compared = _buf("breaking", protos, "--against", file.name)
    lines = compared.stdout.decode()
    found = [f"{match['file']}:{match['line']}: {match['what']}" for match in _BREAK.finditer(lines)]
    if compared.returncode and not found:
        raise SystemExit(f"buf breaking failed:\n{compared.stderr.decode()}{lines}")
    return found


def breaking_lines(changelog: str) -> list[str]:
    """Returns the entries under "Breaking" of the unreleased part of a changelog."""
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    section = unreleased and re.search(r"^### Breaking\n(.*?)(?=^### |\Z)", unreleased[1], re.MULTILINE | re.DOTALL)
    return re.findall(r"^- .+", section[1], re.MULTILINE) if section else []


def check(root: Path) -> str:
    """Returns why `protos/` does not fit its baseline, and what to do; empty if it fits."""
    protos = root / "protos"
    baseline = (protos / "baseline.txtpb").read_text()
    if broken := breaks(protos, baseline):
        return (
            "protos/ breaks the contract in protos/baseline.txtpb:\n  "
            + "\n  ".join(broken)
            + "\nRestore what was there; retired numbers and names are `reserved`. If the break is intended,\n"
            "add a line under '### Breaking' of '## [Unreleased]' in CHANGELOG.md and run 'make proto-baseline'."
        )
    if text_format.Parse(baseline, descriptor_pb2.FileDescriptorSet()) != described(protos):
        return (
            "protos/ has additions that protos/baseline.txtpb lacks: run 'make proto-baseline' and commit the result."
        )
    return ""


def renew(root: Path, *, additive: bool = False) -> str:
    """Writes the baseline from `protos/`; returns why it did not, and what to do; empty if it did.

    The reference is the last commit, so that several renewals within one change count as one.

    Args:
        root: the repository.
        additive: whether a breaking change leaves the baseline as it is, without a reason.
    """
    protos, target = root / "protos", root / "protos/baseline.txtpb"
    committed = _committed(root, "protos/baseline.txtpb")
    if broken := breaks(protos, committed) if committed else []:
        if additive:
            return ""
        known = breaking_lines(_committed(root, "CHANGELOG.md"))
        if not set(breaking_lines((root / "CHANGELOG.md").read_text())).difference(known):
            return (
                "protos/ breaks the contract of the last commit:\n  "
                + "\n  ".join(broken)
                + "\nAdd a line that says so under '### Breaking' of '## [Unreleased]' in CHANGELOG.md, in this change."
            )
    target.write_text(to_text(described(protos)))
    return ""


def _committed(root: Path, path: str) -> str:
    """Returns a file of the last commit; empty if it has none."""
    shown = subprocess.run(["git", "-C", root, "show", f"HEAD:{path}"], capture_output=True, text=True, check=False)
    return "" if shown.returncode else shown.stdout


def _buf(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    # Without a folder for its cache, buf would want one in the home directory.
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "BUF_CACHE_DIR": cache}
        return subprocess.run([BUF, *arguments], capture_output=True, env=environment, check=False)


def main() -> None:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "renew"])
    parser.add_argument("--additive", action="store_true", help="leave the baseline as it is if protos/ breaks it")
    asked = parser.parse_args()
    if why := check(ROOT) if asked.command == "check" else renew(ROOT, additive=asked.additive):
        raise SystemExit(why)


if __name__ == "__main__":
    main()

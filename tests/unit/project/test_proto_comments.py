"""Comments in protos: messages, enums and services have one, and so do all fields except plain ones."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROTOS = sorted((Path(__file__).parents[3] / "protos/shoal/v1").glob("*.proto"))
# Fields whose name says all: names of jobs and ids of members, and messages whose own comment explains them.
PLAIN = {"job", "worker", "member", "status", "spec", "stamp", "header", "chunks", "text"}
_BLOCK = re.compile(r"(message|enum|service|oneof) (\w+) \{(\})?")
_FIELD = re.compile(r"(?P<type>[\w.<>, ]+ )?(?P<name>\w+) = \d+")


def bare(text: str) -> Iterator[str]:
    """Yields the qualified names of what has no comment above it or behind it, in the text of a proto file.

    Plain fields do not count, nor do variants of a oneof that are messages, since these have comments.
    """
    blocks: list[tuple[str, str]] = []
    above = ""
    for line in map(str.strip, text.splitlines()):
        has_comment = above.startswith("//") or "//" in line
        above = line
        if line.startswith("//"):
            continue
        path = ".".join(name for _, name in blocks)
        if block := _BLOCK.match(line):
            if not has_comment:
                yield f"{path}.{block[2]}".lstrip(".")
            if not block[3]:
                blocks.append((block[1], block[2]))
        elif line.startswith("}"):
            blocks.pop()
        elif blocks and not has_comment and (name := _element(line, blocks[-1][0])):
            yield f"{path}.{name}"


def _element(line: str, block: str) -> str:
    """Returns the name of the RPC, the field or the value that a line defines and that needs a comment, or ""."""
    if rpc := re.match(r"rpc (\w+)", line):
        return rpc[1]
    field = _FIELD.match(line)
    if field is None or field["name"] in PLAIN:
        return ""
    is_variant = block == "oneof" and (field["type"] or "")[:1].isupper()
    return "" if is_variant else field["name"]


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.stem)
def test_every_element_has_a_comment(proto: Path) -> None:
    assert list(bare(proto.read_text())) == []


def test_elements_without_a_comment_are_found() -> None:
    text = """
// A lane.
message Lane {
  string job = 1;
  // Its width.
  uint64 width = 2;
  map<string, double> depths = 3;
  oneof end {
    Wall wall = 4;
    bool open = 5;
  }
}
message Wall {}
enum Side {
  LEFT = 0;
  RIGHT = 1;  // or starboard
}
service Lanes {
  rpc Open(Lane) returns (Wall);
}
"""
    assert list(bare(text)) == [
        "Lane.depths",
        "Lane.end",
        "Lane.end.open",
        "Wall",
        "Side",
        "Side.LEFT",
        "Lanes",
        "Lanes.Open",
    ]

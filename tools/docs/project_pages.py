"""Pages that the site takes from elsewhere in the repository: the top-level documents, and the index of decisions."""

import os
import re
from pathlib import Path

from markdown_text import page, table, text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Documents at the top of the repository, by the page of the site that holds each.
DOCUMENTS = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_DECISION = re.compile(r"# (\d+)\. (.+)\n\n- Status: (.+)\n- Date: (\d{4}-\d\d-\d\d)\n")


def relocated(markdown: str, home: str) -> str:
    """Returns a top-level document as a page of the site: links go to pages, and other files are only named."""

    def link(match: re.Match[str]) -> str:
        mark, shown, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        if path in DOCUMENTS:
            to = DOCUMENTS[path]
        elif path.startswith("docs/") and (ROOT / path).suffix:
            to = path.removeprefix("docs/")
        elif path.rstrip("/") == "docs/decisions":
            to = "decisions/index.md"
        else:
            return f"`{path}`" if shown == path else f"{shown} (`{path}`)"
        return f"{mark}[{shown}]({os.path.relpath(to, os.path.dirname(home))}{hash_}{anchor})"

    return _LINK.sub(link, markdown)


def decisions() -> list[tuple[str, str, str, str, str]]:
    """Returns number, title, status, date and file of each decision.

    Raises:
        ValueError: a decision does not begin with its number, title, status and date.
    """
    found = []
    for file in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        match = _DECISION.match(file.read_text())
        if not match or int(match[1]) != int(file.name[:4]):
            raise ValueError(f"{file} does not begin with '# NUMBER. TITLE', '- Status: ...' and '- Date: YYYY-MM-DD'")
        number, title, status, date = match.groups()
        found.append((number, title, status, date, file.name))
    return found


def pages() -> dict[str, str]:
    """Returns the pages of top-level documents, and the index of decisions."""
    found = {home: relocated((ROOT / name).read_text(), home) for name, home in DOCUMENTS.items()}
    rows = [[number, f"[{text(title)}]({file})", status, date] for number, title, status, date, file in decisions()]
    lines = [
        "# Decisions",
        "",
        "Each page describes one design choice, its reasons, and the alternatives. Decisions are history: pages keep",
        "the facts of their date. If a later decision replaces or amends one, its status names the later one.",
        *table(["number", "decision", "status", "date"], rows),
    ]
    return found | {"decisions/index.md": page(lines)}

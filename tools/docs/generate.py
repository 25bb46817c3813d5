"""Generator of those pages of the documentation that are not written by hand. It writes them to `docs/`.

git ignores the generated pages. `make docs` runs this script before the site is built, so that MkDocs and Zensical read
plain Markdown and need no hook.
"""

import logging
import shutil
from pathlib import Path

import api_pages
import cli_pages
import error_pages
import limit_pages
import metric_pages
import optimizer_pages
import project_pages
import proto_pages
import structlog

DOCS = Path(__file__).parents[2] / "docs"
# What is generated, and so may be deleted; .gitignore has the same.
FOLDERS = (
    "reference/cli",
    "reference/errors",
    "reference/limits",
    "reference/metrics",
    "reference/optimizers",
    "reference/protocol",
    "reference/python",
    "project",
)
FILES = ("decisions/index.md",)


def pages() -> dict[str, str]:
    """Returns all generated pages, by their path under `docs/`."""
    found: dict[str, str] = {}
    for part in (
        api_pages,
        cli_pages,
        error_pages,
        limit_pages,
        metric_pages,
        optimizer_pages,
        project_pages,
        proto_pages,
    ):
        found |= part.pages()
    return found


def write(found: dict[str, str], docs: Path = DOCS) -> None:
    """Writes the pages, and deletes generated pages that are no more. A page that is the same keeps its time.

    Raises:
        ValueError: a page is outside of the generated folders.
    """
    for path in found:
        if path not in FILES and not path.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
            raise ValueError(f"{path} is in none of {FOLDERS}")
    for folder in FOLDERS:
        for file in (docs / folder).rglob("*"):
            if file.is_file() and str(file.relative_to(docs)) not in found:
                file.unlink()
        if not any((docs / folder).rglob("*.md")):
            shutil.rmtree(docs / folder, ignore_errors=True)
    for path, markdown in found.items():
        file = docs / path
        if not file.exists() or file.read_text() != markdown:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(markdown)


if __name__ == "__main__":
    # Roles that run for their metrics log what they do.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    write(pages())

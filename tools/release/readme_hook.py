"""Metadata hook of hatchling: makes README.md the description of a distribution, with absolute links.

An index shows the description where no file of the repository is near. So a link to a page of `docs/` becomes a link to
the documentation site, and a link to another file becomes a link to that file beside the changelog. `[project.urls]` in
pyproject.toml names both.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute(text: str, urls: Mapping[str, str]) -> str:
    """Returns a text in Markdown of the repository's root with absolute links.

    Args:
        text: the text.
        urls: the project's URLs by name; `Documentation` and `Changelog` are used.
    """

    def target(link: re.Match[str]) -> str:
        path, mark, anchor = link[1].partition("#")
        if re.match(r"[a-z]+:", path) or not path:
            return link[0]
        if not path.startswith("docs/"):
            return f"]({urljoin(urls['Changelog'], path)}{mark}{anchor})"
        page = path.removeprefix("docs/")
        if page.endswith(".md"):
            page = page.removesuffix(".md").removesuffix("index")
        site = urls["Documentation"].rstrip("/")
        file = "" if Path(page).suffix or page.endswith("/") or not page else "/"
        return f"]({site}/{page}{file}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", target, text)


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, metadata["urls"])}

"""Addresses of pages of the documentation, for messages that send their reader to a page."""

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata

# The host of the project's addresses until the project has one.
_UNPUBLISHED = "//example.invalid/"


@cache
def docs_url(page: str) -> str:
    """Returns the address of a page on the documentation site, or the page's file if no site is published.

    The project's URLs in the package's metadata name the site.

    Args:
        page: the page below `docs/`, without its suffix, with an anchor if one is wanted: `how-to/data#cost`.
    """
    name, mark, anchor = page.partition("#")
    return f"{site}/{name}/{mark}{anchor}" if (site := _site()) else f"docs/{name}.md"


def _site() -> str:
    """Returns the address of the site, without a slash at its end; empty if it is not known."""
    try:
        urls: list[str] = metadata("shoal").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    found = dict(each.split(", ", 1) for each in urls)
    site = found.get("Documentation", "")
    return "" if _UNPUBLISHED in site else site.rstrip("/")

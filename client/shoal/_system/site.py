"""Address of the documentation site, for messages that send their reader to a page."""

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata


def docs_url(page: str) -> str:
    """Returns the address of a page on the documentation site.

    The project's URLs in the package's metadata name the site.

    Args:
        page: the page below `docs/`, without its suffix, with an anchor if one is wanted: `how-to/data#cost`.
    """
    name, mark, anchor = page.partition("#")
    return f"{_site()}/{name}/{mark}{anchor}"


@cache
def _site() -> str:
    """Returns the address of the site, without a slash at its end. Without an installation, it is the folder `docs`."""
    try:
        urls: list[str] = metadata("shoal").get_all("Project-URL") or []
    except PackageNotFoundError:
        urls = []
    found = dict(each.split(", ", 1) for each in urls)
    return found.get("Documentation", "docs").rstrip("/")

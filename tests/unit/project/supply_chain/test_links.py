"""Links and addresses that a reader gets without the repository: the wheel's description, messages and help texts."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from shoal._system import docs_url

ROOT = Path(__file__).parents[4]
sys.path += [str(ROOT / "tools" / name) for name in ("docs", "release")]

import cli_pages  # noqa: E402 - tools are no package
import readme_hook  # noqa: E402

URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
_PATH = re.compile(r"docs/[\w/-]+\.md")


def _texts(source: str) -> Iterator[str]:
    """Yields the strings of a module, without its docstrings."""
    tree = ast.parse(source)
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_the_built_description_has_no_relative_link() -> None:
    project = {"urls": URLS}
    readme_hook.ReadmeHook(str(ROOT), {}).update(project)
    links = re.findall(r"\]\(([^)\s]+)\)", project["readme"]["text"])
    assert len(links) > 5
    assert [link for link in links if not re.match(r"https?://", link)] == []


def test_each_kind_of_link_becomes_an_address() -> None:
    urls = {"Documentation": "https://d.test/docs/", "Changelog": "https://r.test/blob/main/CHANGELOG.md"}
    text = (
        "[a](docs/how-to/data.md#cost) ![b](docs/images/b.png) [c](docs/index.md) "
        "[d](LICENSE) [e](https://e.test) [f](#f)"
    )
    assert readme_hook.absolute(text, urls) == (
        "[a](https://d.test/docs/how-to/data/#cost) ![b](https://d.test/docs/images/b.png) [c](https://d.test/docs/) "
        "[d](https://r.test/blob/main/LICENSE) [e](https://e.test) [f](#f)"
    )


def test_no_message_names_a_file_that_only_the_repository_has() -> None:
    files = [path for name in ("client", "server", "worker") for path in sorted((ROOT / name).rglob("*.py"))]
    sources = {path.name: source for path in files if _PATH.search(source := path.read_text(encoding="utf-8"))}
    found = [(name, text) for name, source in sources.items() for text in _texts(source) if _PATH.search(text)]
    assert len(files) > 200
    assert found == []
    assert [text for text in cli_pages.pages().values() if _PATH.search(text)] == []


def test_messages_name_pages_of_the_site_that_exist() -> None:
    sources = (path for name in ("client", "server", "worker") for path in (ROOT / name).rglob("*.py"))
    pages = {page for path in sources for page in re.findall(r"docs_url\(['\"]([^'\"]+)", path.read_text())}
    assert len(pages) >= 4
    assert [page for page in sorted(pages) if not (ROOT / "docs" / f"{page.partition('#')[0]}.md").exists()] == []


@pytest.mark.parametrize(
    ("site", "address"),
    [
        ("https://d.test/docs/", "https://d.test/docs/how-to/data/#cost"),
        ("https://example.invalid/shoal/docs", "docs/how-to/data.md"),
        (None, "docs/how-to/data.md"),
    ],
    ids=["published", "not published", "not known"],
)
def test_a_page_is_named_by_its_address_on_the_published_site(
    monkeypatch: pytest.MonkeyPatch, site: str | None, address: str
) -> None:
    found = Message()
    found["Project-URL"] = "Homepage, https://d.test"
    if site:
        found["Project-URL"] = f"Documentation, {site}"
    monkeypatch.setattr("shoal._system.site.metadata", lambda _: found)
    assert docs_url.__wrapped__("how-to/data#cost") == address

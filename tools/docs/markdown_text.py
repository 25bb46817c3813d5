"""Markdown helpers of the generator: tables and escaped text."""

import html
import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([\\*_<>\[\]|])")


def text(plain: str) -> str:
    """Returns plain text with the characters that Markdown reads escaped, but for `code`, which stays code."""
    parts = _CODE.split(" ".join(plain.split()))
    return "".join(code(part.strip("`")) if part.startswith("`") else _SPECIAL.sub(r"\\\1", part) for part in parts)


def code(value: str) -> str:
    """Returns a value as inline code that may stand in a table.

    A vertical bar is written as HTML: Markdown would either end the cell there or show the backslash before it.
    """
    if "|" in value:
        return f"<code>{html.escape(value, quote=False).replace('|', '&#124;')}</code>"
    fence = "``" if "`" in value else "`"
    return f"{fence}{value}{fence}" if value else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose cells are Markdown already."""
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    return ["", *lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def page(lines: Iterable[str]) -> str:
    """Returns a page of these lines, with single empty lines between blocks."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"

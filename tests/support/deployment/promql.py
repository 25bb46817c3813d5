"""Parser of PromQL expressions: finds their metrics and labels by regular expressions, as far as our files need it."""

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

_STRING = re.compile(r'"[^"]*"')
# A name, perhaps with matchers; words of the language and functions have neither our prefixes nor a colon.
_SELECTOR = re.compile(r"\b((?:shoal|process)_\w+|\w+(?::\w+)+|up)\b\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """A metric that an expression selects.

    Attributes:
        name: name of the metric.
        matchers: label, operator and value of each matcher.
    """

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """Returns all metrics of an expression."""
    bare = _GROUPING.sub(" ", expression)
    return [Selector(name, tuple(_MATCHER.findall(matchers or ""))) for name, matchers in _SELECTOR.findall(bare)]


def grouped_by(expression: str) -> set[str]:
    """Returns the labels by which an expression groups or joins results."""
    bare = _STRING.sub('""', expression)
    return {label.strip() for labels in _GROUPING.findall(bare) for label in labels.split(",") if label.strip()}


def strangers(operator: str, value: str, known: AbstractSet[str]) -> set[str]:
    """Returns the values of a matcher that its label never has. To exclude such a value is a mistake as well.

    Args:
        operator: =, !=, =~ or !~.
        value: the matcher's right side. Each alternative of a regular expression must match a whole value of the label,
            as in Prometheus. An expression with groups counts as one alternative.
        known: the label's values.
    """
    if operator in {"=", "!="}:
        return {value} - known
    alternatives = [value] if {"(", "["} & set(value) else value.split("|")
    return {each for each in alternatives if not any(re.fullmatch(each, one) for one in known)}

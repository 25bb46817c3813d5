"""Settings of a program: keyword arguments of its factory, as JSON and as `KEY=VALUE` on a command line."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shoal import errors
from shoal._limits import catalogue

_MAX_BYTES = catalogue.SETTINGS_BYTES.default


def dumped(settings: object) -> str:
    """Returns settings as the JSON text that travels.

    Raises:
        InvalidJob: they are not a mapping of argument names to JSON values.
        LimitExceeded: they are larger than 1 MiB.
    """
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise errors.InvalidJob(f"settings are {settings!r}; give a mapping of argument names to JSON values")
    try:
        text = json.dumps(dict(settings), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidJob(
            f"settings are not JSON: {error}; use strings, finite numbers, booleans, None, lists and mappings"
        ) from None
    if len(text) > _MAX_BYTES:
        raise catalogue.SETTINGS_BYTES.refusal(
            f"settings are {len(text)} bytes of JSON",
            "put large data where the program can load it",
            bytes=len(text),
        )
    return text


def loaded(text: str) -> Mapping[str, Any]:
    """Returns the settings that a JSON text carries; an empty text carries none.

    Raises:
        InvalidJob: the text is not a JSON object.
    """
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise errors.InvalidJob(f"settings_json is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise errors.InvalidJob("settings_json is not a JSON object of keyword arguments")
    return settings


def parse(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Parses `--set KEY=VALUE` options. A value that is not JSON is a string.

    Raises:
        InvalidJob: a pair has no `=` or no key.
    """
    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise errors.InvalidJob(f"--set {pair!r} is not KEY=VALUE, with an argument name of the factory as its key")
        found[key] = value(text)
    return found


def value(text: str) -> Any:
    """Returns the value of a JSON text. A text that is not JSON is itself the value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


__all__ = ["dumped", "loaded", "parse", "value"]

"""Limits and checks of short texts in requests, such as names of devices and addresses; and texts cut to a limit."""

import re
import unicodedata

from shoal import errors
from shoal._limits import catalogue
from shoal._wire.limits import FIELD_BYTES

# Categories of Unicode that a field must not contain: controls, formats such as changes of direction, surrogates, and
# separators of lines and paragraphs. A terminal or a log would act on them.
_REFUSED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]"
_ADDRESS = re.compile(rf"(?P<host>{_HOST}):(?P<port>[0-9]{{1,5}})")
# Words that gRPC would read as the scheme of an address, as in unix:80, and not as a host.
_SCHEMES = frozenset({"unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds", "passthrough"})


def check_text(what: str, text: str) -> None:
    """Checks that a text of a request is short and has no control characters.

    Args:
        what: the text's name and owner for the message, such as "device of worker-1".
        text: the text; it may be empty.

    Raises:
        LimitExceeded: it is too long.
        BadRequest: it has control characters.
    """
    size = len(text.encode(errors="replace"))
    if size > FIELD_BYTES:
        raise catalogue.FIELD_BYTES.refusal(f"{what} has {size} bytes")
    if without_controls(text) != text:
        raise errors.BadRequest(f"{what} is {text!r}, which has control characters; leave them out")


def check_address(what: str, text: str) -> None:
    """Checks that a text is the address of a host, as other processes will connect to it.

    Args:
        what: the text's name and owner for the message.
        text: host:port. A port is at least 1, and an IPv6 address is in brackets.

    Raises:
        LimitExceeded: it is too long.
        BadRequest: it is something else, such as an address with a scheme.
    """
    check_text(what, text)
    found = _ADDRESS.fullmatch(text)
    if found and not 0 < int(found["port"]) <= 65_535:
        raise errors.BadRequest(f"{what} is {text!r}; give a port from 1 to 65535", address=text)
    if not found or found["host"].lower() in _SCHEMES:
        raise errors.BadRequest(
            f"{what} is {text!r}; give host:port without a scheme, such as 10.0.0.5:7070 or [fd00::5]:7070",
            address=text,
        )


def without_controls(text: str) -> str:
    """Returns a text with a question mark for each control character."""
    if text.isprintable():
        return text
    return "".join("?" if unicodedata.category(letter) in _REFUSED_CATEGORIES else letter for letter in text)


def shortened(text: str) -> str:
    """Returns the beginning of a text, within the limit of a field."""
    return text.encode(errors="replace")[:FIELD_BYTES].decode(errors="ignore")


def without_middle(text: str, most: int) -> str:
    """Returns the beginning and the end of a text with more than `most` bytes. A traceback ends with the error."""
    encoded = text.encode(errors="replace")  # a name from a file may have half of a surrogate pair
    if len(encoded) <= most:
        return encoded.decode()
    beginning, end = encoded[: most // 4], encoded[-(most - most // 4) :]
    return f"{beginning.decode(errors='ignore')} [...] {end.decode(errors='ignore')}"


def with_ellipsis(text: str, most: int) -> str:
    """Returns a text, cut to `most` characters with an ellipsis at its end."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


__all__ = ["check_address", "check_text", "shortened", "with_ellipsis", "without_controls", "without_middle"]

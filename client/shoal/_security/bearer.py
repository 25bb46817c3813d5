"""Bearer tokens in the metadata of a call."""

from shoal._limits import catalogue

# This bounds the work for a caller that is not authenticated yet.
MAX_TOKEN_BYTES = catalogue.MAX_TOKEN_BYTES.default
# The part of its time after which a ticket, or a token of the coordinator, is replaced. It is valid for ten minutes. So
# if the clock of the process that checks it is up to five minutes ahead, it is valid until it is replaced.
RENEWED_AFTER = 0.4
_KEY, _SCHEME = "authorization", "Bearer "


def authorization(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call with a token, or none for an empty token."""
    return ((_KEY, f"{_SCHEME}{token}"),) if token else ()


def token_in(metadata: object) -> str:
    """Returns the token in the metadata of a call, or an empty string.

    Args:
        metadata: pairs of key and value, as grpcio gives them.
    """
    found = value_in(metadata, _KEY)
    return found[len(_SCHEME) :] if found.startswith(_SCHEME) else ""


def value_in(metadata: object, wanted: str) -> str:
    """Returns the first text with a key in the metadata of a call, or an empty string.

    Args:
        metadata: pairs of key and value, as grpcio gives them.
        wanted: the key.
    """
    for key, value in metadata or ():  # type: ignore[attr-defined]
        if key == wanted and isinstance(value, str):
            return value
    return ""


__all__ = ["MAX_TOKEN_BYTES", "RENEWED_AFTER", "authorization", "token_in", "value_in"]

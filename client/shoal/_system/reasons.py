"""Lists of reasons in error messages."""

from collections.abc import Sequence

# Maximum number of reasons in an error.
_MAX_REASONS = 50


def listed(reasons: Sequence[str]) -> str:
    """Returns the first 50 reasons as one text, with the number of those that are left out."""
    more = len(reasons) - _MAX_REASONS
    return "; ".join(reasons[:_MAX_REASONS]) + (f"; and {more:,} more" if more > 0 else "")


__all__ = ["listed"]

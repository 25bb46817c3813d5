"""Bounds of the parts of an axis that is split over devices or ranks."""

import itertools

from shoal import errors


def part_bounds(length: int, parts: int, what: str = "an axis", over: str = "devices") -> tuple[slice, ...]:
    """Returns the bounds of each part. If an axis cannot be divided evenly, the first parts have one element more.

    Args:
        length: length of the axis.
        parts: number of parts.
        what: the axis, for the message.
        over: what has the parts, for the message.

    Raises:
        InvalidShape: there are fewer elements than parts.
    """
    if length < parts:
        raise errors.InvalidShape(
            f"{what} has {length} elements, too few to be split over {parts} {over}; use fewer {over}, or a layer that "
            "is not split"
        )
    least, more = divmod(length, parts)
    starts = [number * least + min(number, more) for number in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(starts))


__all__ = ["part_bounds"]

"""Bounds of the parts of an axis that is split over devices."""

import itertools

from shoal import errors


def part_bounds(length: int, devices: int, what: str = "an axis") -> tuple[slice, ...]:
    """Returns the part of each device. If the devices do not divide the axis, the first ones have one element more.

    Args:
        length: length of the axis.
        devices: number of devices.
        what: the axis, for the message.

    Raises:
        InvalidShape: there are fewer elements than devices.
    """
    if length < devices:
        raise errors.InvalidShape(
            f"{what} has {length} elements, too few to be split over {devices} devices; use fewer devices, or a layer "
            "that is not split"
        )
    least, more = divmod(length, devices)
    starts = [number * least + min(number, more) for number in range(devices + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(starts))


__all__ = ["part_bounds"]

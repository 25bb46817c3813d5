"""Affine maps of images, computed on the host: the places (row, column) from which the pixels (row, column, 1) come."""

import math

import numpy as np

Maps = np.ndarray  # [batch, 2, 3]


def rotations(turns: np.ndarray, height: int, width: int) -> Maps:
    """Returns maps that rotate images around their middle.

    Args:
        turns: angles in full turns, [batch]. Above 0 is counterclockwise.
        height: height of the images.
        width: their width.
    """
    cosine, sine = np.cos(turns * 2 * math.pi), np.sin(turns * 2 * math.pi)
    middle_row, middle_column = (height - 1) / 2, (width - 1) / 2
    rows = [cosine, sine, middle_row - middle_row * cosine - middle_column * sine]
    columns = [-sine, cosine, middle_column - middle_column * cosine + middle_row * sine]
    return _stacked(rows, columns)


def zooms(down: np.ndarray, across: np.ndarray, height: int, width: int) -> Maps:
    """Returns maps that show a part of an image, or more than the image, with its middle where it was.

    Args:
        down: heights of what is shown, in heights of the images, [batch].
        across: the same for the widths.
        height: height of the images.
        width: their width.
    """
    none = np.zeros_like(down)
    return _stacked(
        [down, none, (height - 1) / 2 * (1 - down)],
        [none, across, (width - 1) / 2 * (1 - across)],
    )


def translations(down: np.ndarray, across: np.ndarray) -> Maps:
    """Returns maps that move images by distances in pixels, [batch] each."""
    one, none = np.ones_like(down), np.zeros_like(down)
    return _stacked([one, none, -down], [none, one, -across])


def _stacked(rows: list[np.ndarray], columns: list[np.ndarray]) -> Maps:
    return np.stack([np.stack(rows, axis=1), np.stack(columns, axis=1)], axis=1)


__all__ = ["Maps", "rotations", "translations", "zooms"]

"""Names of jobs whose users give none."""

import random
import string
from collections.abc import Callable


def draw_name(program: str, draw: Callable[[int], int] = random.getrandbits) -> str:
    """Returns a name made from the name of a program, with a random suffix from `draw`."""
    module = program.partition(":")[0].rpartition(".")[2].lower()
    stem = "".join(letter if letter in string.ascii_lowercase + string.digits else "-" for letter in module)
    stem = stem.lstrip("-0123456789")[:48].rstrip("-") or ("job" if program else "session")
    return f"{stem}-{draw(24):06x}"


__all__ = ["draw_name"]

"""The number of lines that a call executes: a measure of its cost that does not depend on the machine."""

import sys
from collections.abc import Callable
from typing import Any


def lines_of(call: Callable[[], object]) -> int:
    """Returns the number of lines of Python, and of iterations of comprehensions, that a call executes."""
    lines, outer = 0, sys.gettrace()

    def count(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(outer)
    return lines

"""Imports of optional packages."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load(module: str, what: str, *, extra: str = "data") -> Any:
    """Imports a module of an optional package.

    Args:
        module: full name of the module.
        what: the feature that needs it, for the message.
        extra: the extra of Shoal that installs the package.

    Returns:
        The module. Its types are not known here.

    Raises:
        ImportError: the package is not installed. The message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{what} needs {package}, which cannot be imported ({error}); install it: pip install 'shoal[{extra}]'"
        ) from None


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Lets imports in the block find none of these packages, unless they are loaded already.

    Some dependencies import optional packages whenever these are installed, although Shoal does not need them. Such
    imports can take a third of the time in which a process starts.

    Args:
        packages: names of packages, such as "rich" or "scipy.linalg".
    """
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is how Python marks a missing module
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


__all__ = ["hidden", "load"]

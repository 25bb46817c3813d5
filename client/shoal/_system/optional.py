"""Imports of optional packages."""

import importlib
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


__all__ = ["load"]

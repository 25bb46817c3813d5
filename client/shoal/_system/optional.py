"""Packages that only some of Shoal needs, imported when that is used."""

import importlib
from typing import Any


def load(module: str, who: str, *, extra: str = "data") -> Any:
    """Imports a module of an extra; its types are not known here.

    Raises:
        ImportError: it is not installed; the message says what to install, and for whom.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{who} needs {package}, which does not import here ({error}); install it: pip install 'shoal[{extra}]'"
        ) from None


__all__ = ["load"]

"""Common parts of the adapters to frameworks: the opening of a session, its end with the script, and its epochs.

Only `shoal.jax`, `shoal.keras`, `shoal.torch` and `shoal.transformers` use this package. It imports no framework.
"""

from shoal._adapters.epochs import EpochRanges
from shoal._adapters.opening import check_client, check_optimizer, open_session
from shoal._adapters.script_end import ScriptEnd

__all__ = ["EpochRanges", "ScriptEnd", "check_client", "check_optimizer", "open_session"]

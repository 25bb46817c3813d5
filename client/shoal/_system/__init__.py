"""Access to the host and the installation: packages, plugins, files, volumes, listeners, randomness, identity, build.

It also has the checks of arguments of public functions, and the parser of `TF_CONFIG`.

This file does not export `volumes`, `build`, `private_files`, `listeners`, `tf_config` and `exit_codes`: other packages
import these modules directly. Every package may import this one. It imports nothing of Shoal except `errors`.
"""

from shoal._system.arguments import check_count, check_seconds, check_type
from shoal._system.atomic_file import atomic_write
from shoal._system.deprecation import deprecated, warn_deprecated
from shoal._system.host import ENTROPY, host_id
from shoal._system.memory import memory_limit, resident_bytes
from shoal._system.open_files import open_files_warning, raise_open_files
from shoal._system.optional import hidden, load
from shoal._system.reasons import listed
from shoal._system.registry import Registry
from shoal._system.site import docs_url

__all__ = [
    "ENTROPY",
    "Registry",
    "atomic_write",
    "check_count",
    "check_seconds",
    "check_type",
    "deprecated",
    "docs_url",
    "hidden",
    "host_id",
    "listed",
    "load",
    "memory_limit",
    "open_files_warning",
    "raise_open_files",
    "resident_bytes",
    "warn_deprecated",
]

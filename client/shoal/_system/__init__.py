"""Access to the host and the installation: optional packages, plugins, files, volumes, host identity and build.

`volumes` and `build` are imported as modules. The only other part of Shoal that this package imports is `errors`. Every
package may import it.
"""

from shoal._system.atomic_file import atomic_write
from shoal._system.deprecation import deprecated, warn_deprecated
from shoal._system.host import host_id
from shoal._system.optional import load
from shoal._system.registry import Registry

__all__ = [
    "Registry",
    "atomic_write",
    "deprecated",
    "host_id",
    "load",
    "warn_deprecated",
]

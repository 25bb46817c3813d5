"""What Shoal asks of its surroundings: optional packages, whole files, volumes, the identity of the host; deprecation.

`volumes` and `build`, which says what runs, are imported as modules.

Knows nothing of Shoal but its errors. Every package may import it.
"""

from shoal._system.deprecation import deprecated, warn_deprecated
from shoal._system.host import host_id
from shoal._system.optional import load
from shoal._system.whole_file import written_whole

__all__ = [
    "deprecated",
    "host_id",
    "load",
    "warn_deprecated",
    "written_whole",
]

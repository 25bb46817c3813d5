"""What Shoal asks of its surroundings: optional packages, plugins, whole files, volumes, and the identity of the host.

Knows nothing of Shoal but its errors. Every package may import it.
"""

from shoal._system.host import host_id
from shoal._system.optional import load
from shoal._system.registry import Registry
from shoal._system.whole_file import written_whole

__all__ = [
    "Registry",
    "host_id",
    "load",
    "written_whole",
]

"""The process of a role: identity, options, signals, logs, HTTP endpoints, and its start as a child process.

Coordinators, servers and workers import this package; so do the command line and `shoal.LocalCluster`. This file does
not export modules with slow imports, such as `web_server`. Code that needs them imports them directly.
"""

from shoal._role.fork_server import ForkServer
from shoal._role.process import RoleProcess

__all__ = [
    "ForkServer",
    "RoleProcess",
]

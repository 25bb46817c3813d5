"""The process of a role: identity, options, signals, logs, HTTP endpoints, and its start as a child process.

Coordinators, servers and workers import this package; so do the command line and `shoal.LocalCluster`.
Modules with slow imports, such as the web server, are imported by their own names where they are needed.
"""

from shoal._role.process import RoleProcess

__all__ = [
    "RoleProcess",
]

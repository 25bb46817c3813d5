"""The process of a role: who it is, its flags, signals and logs, its pages, and how others start it.

Coordinators, servers and workers import it, and so do the command line and `shoal.LocalCluster`, which start them.
Modules that load much, such as the web server, are imported by their own names, where they are needed.
"""

from shoal._role.process import RoleProcess

__all__ = [
    "RoleProcess",
]

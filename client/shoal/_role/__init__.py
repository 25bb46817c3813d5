"""The process of a role: who it is, its flags, signals and logs, its pages, and how others start it.

Coordinators, servers and workers import it, and so do the command line and `shoal.LocalCluster`, which start them.
"""

from shoal._role.process import RoleProcess
from shoal._role.web_server import Bounds, WebServer, in_thread

__all__ = [
    "Bounds",
    "RoleProcess",
    "WebServer",
    "in_thread",
]

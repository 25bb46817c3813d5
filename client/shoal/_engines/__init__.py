"""Parts of clusters that another engine starts, such as Ray: what they need, their command lines, and their scaling.

An engine places processes on nodes and starts them again when they die. These modules know no engine, so their tests
need none. `shoal.ray` and `shoal.slurm` use them.
"""

from shoal._engines.autoscaler import Autoscaler, WorkerScaling
from shoal._engines.resources import DEFAULT_RESOURCES, Request, check_resources, requests, shortage, waiting
from shoal._engines.role_child import RoleChild, log_tail
from shoal._engines.role_deaths import pause_after_death
from shoal._engines.role_flags import ROLES, check_flags
from shoal._engines.role_folder import claim, release
from shoal._engines.role_spec import RolePlace, RoleSpec, role_variables
from shoal._engines.wanted_workers import read_wanted_workers

__all__ = [
    "DEFAULT_RESOURCES",
    "ROLES",
    "Autoscaler",
    "Request",
    "RoleChild",
    "RolePlace",
    "RoleSpec",
    "WorkerScaling",
    "check_flags",
    "check_resources",
    "claim",
    "log_tail",
    "pause_after_death",
    "read_wanted_workers",
    "release",
    "requests",
    "role_variables",
    "shortage",
    "waiting",
]

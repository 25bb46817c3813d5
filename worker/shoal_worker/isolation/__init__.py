"""Isolation of trainers from their daemon: the environment, the limits and the user of the process that runs a program.

`guard` is the process between a daemon and its trainer. Only `daemon`, `main` and `trainer_process` import this
package.
"""

from shoal_worker.isolation.certificate import trainer_tls
from shoal_worker.isolation.environment import ALLOWED, ALLOWED_PREFIXES, trainer_environment
from shoal_worker.isolation.guard import KILL
from shoal_worker.isolation.hiding import hide_environment
from shoal_worker.isolation.limits import TrainerLimits
from shoal_worker.isolation.settings import GuardedCommand, TrainerIsolation
from shoal_worker.isolation.user import TrainerUser

__all__ = [
    "ALLOWED",
    "ALLOWED_PREFIXES",
    "KILL",
    "GuardedCommand",
    "TrainerIsolation",
    "TrainerLimits",
    "TrainerUser",
    "hide_environment",
    "trainer_environment",
    "trainer_tls",
]

"""The options and environment variables of a run's roles (no I/O)."""

from collections.abc import Mapping
from pathlib import Path

from shoal._engines import role_variables
from shoal._role.worker_options import THREADS, repeated
from shoal.slurm._allocation import Allocation
from shoal.slurm._run_folder import RunFolder, RunPlan


def role_environment(role: str, environment: Mapping[str, str], folder: RunFolder, state_folder: str) -> dict[str, str]:
    """Returns the environment variables of a role.

    Args:
        role: coordinator, server or worker.
        environment: those of the task.
        folder: the folder of the run.
        state_folder: the role keeps its access file there, and not in the home folder, which nodes may share. So
            members find no token, and their certificates say who they are.
    """
    further, cores = folder.tls(role), environment.get("SLURM_CPUS_PER_TASK", "")
    if cores and not any(name in environment for name in THREADS):
        further |= dict.fromkeys(THREADS, cores)
    return role_variables(environment, further, Path(state_folder))


def coordinator_flags(
    plan: RunPlan, place: Allocation, folder: RunFolder, state_folder: str, earlier: str = ""
) -> list[str]:
    """Returns the options of the coordinator. `earlier` is the address that it had before it died, and keeps."""
    host = place.listen.rpartition(":")[0]
    listen = f"{host}:{earlier.rpartition(':')[2]}" if earlier else place.listen
    return [
        *_common(plan, "coordinator", place, listen),
        *("--checkpoints", folder.checkpoints(plan)),
        # On this node: a network file system may lack the locks of a store. The next attempt goes on from a checkpoint.
        *("--store", f"{state_folder}/coordinator.db", "--scratch", state_folder),
        *("--page-listen", "127.0.0.1:0"),
        *plan.flags.get("coordinator", ()),
    ]


def member_flags(
    role: str, name: str, plan: RunPlan, place: Allocation, folder: RunFolder, coordinator: str
) -> list[str]:
    """Returns the options of a server or a worker.

    Args:
        role: server or worker.
        name: its name in the cluster.
        plan: the plan of the run.
        place: the place of the task.
        folder: the folder of the run.
        coordinator: host:port of the coordinator.
    """
    flags = [*_common(plan, role, place, place.listen), "--coordinator", coordinator, "--name", name]
    if role == "server":
        flags += ["--checkpoints", folder.checkpoints(plan), "--grace-period", f"{plan.save_timeout_s:g}"]
        flags += ["--zone", place.zone]
    else:
        certificate, key = map(str, folder.pair("trainer"))
        flags += ["--trainer-tls-cert", certificate, "--trainer-tls-key", key]
        flags += repeated("--path", plan.path)
        if place.gpu is not None:
            flags += ["--device", f"cuda:{place.gpu}"]
    return [*flags, *plan.flags.get(role, ())]


def _common(plan: RunPlan, role: str, place: Allocation, listen: str) -> list[str]:
    flags = ["--listen", listen, "--advertise", place.host, "--metrics-listen", place.listen]
    level = [] if "--log-level" in plan.flags.get(role, ()) else ["--log-level", "warning"]
    return [*flags, *level]


__all__ = ["coordinator_flags", "member_flags", "role_environment"]

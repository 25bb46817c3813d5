"""Command `shoal worker`: its options and `SHOAL_*` variables."""

from pathlib import Path
from typing import Annotated

import typer

from shoal._numerics import kernels
from shoal._role import flags
from shoal._role.identity import RoleIdentity

DeviceFlag = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_DEVICE",
        help="Device to compute on: cpu, cuda:N, or auto, which takes the first GPU if there is one.",
    ),
]
DeviceMemoryLimit = Annotated[
    float,
    typer.Option(
        envvar="SHOAL_DEVICE_MEMORY_LIMIT",
        min=0,
        help="Limit of GPU memory for a job's arrays. 0 means no limit. A value of at most 1 is a fraction of the "
        "GPU's memory. A larger value is a number of bytes.",
    ),
]
Paths = Annotated[
    list[Path] | None,
    typer.Option(
        envvar="SHOAL_PATH",
        exists=True,
        file_okay=False,
        help="Folder to import programs from. Repeatable. Default: the working directory.",
    ),
]
Grace = Annotated[
    float, typer.Option(min=0, envvar="SHOAL_GRACE_PERIOD", help="Seconds to finish the current batch after SIGTERM.")
]


def worker(
    coordinator: flags.Coordinator = "",
    name: flags.Name = "",
    device: DeviceFlag = "auto",
    device_memory_limit: DeviceMemoryLimit = 0.0,
    path: Paths = None,
    allow_program: flags.AllowPrograms = None,
    listen: flags.Listen = "",
    advertise: flags.Advertise = "",
    metrics_listen: flags.MetricsListen = flags.ANY_PORT,
    retry_for: flags.RetryFor = 30.0,
    grace_period: Grace = 30.0,
    log_format: flags.LogFormat = "console",
    log_level: flags.LogLevel = "info",
    supervised: flags.Supervised = False,
) -> None:
    """Trains the jobs that the coordinator assigns, on one device."""
    from shoal._role.lifecycle import identify, run_role  # noqa: PLC0415
    from shoal_worker.allowed_programs import DEFAULT_PATTERNS  # noqa: PLC0415
    from shoal_worker.daemon import Daemon, WorkerConfig  # noqa: PLC0415
    from shoal_worker.process import start_worker  # noqa: PLC0415

    given = RoleIdentity(name=name, listen=listen, advertise=advertise, coordinator=coordinator)
    who = identify("worker", given, log_format=log_format, log_level=log_level)
    config = WorkerConfig(
        coordinator=who.coordinator,
        name=who.name,
        device=device,
        device_memory_limit=device_memory_limit,
        paths=tuple(str(folder.resolve()) for folder in path or [Path()]),
        allow_programs=tuple(allow_program or DEFAULT_PATTERNS),
        retry_for_s=retry_for,
        leave_grace_s=grace_period,
        listen=who.listen,
        advertise=who.advertise,
    )
    with kernels.precompiled():
        run_role(
            "worker",
            lambda registry, metrics_address: start_worker(config, registry, metrics_address),
            metrics_listen=metrics_listen,
            advertise=who.advertise,
            leave=Daemon.leave,
            member=who.name,
            log_format=log_format,
            log_level=log_level,
            supervised=supervised,
        )

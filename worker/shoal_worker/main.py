"""Command `shoal worker`: its options and `SHOAL_*` variables."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from shoal import errors
from shoal._numerics import kernels
from shoal._role import flags
from shoal._role.identity import RoleIdentity
from shoal._role.options import command_of
from shoal._system.exit_codes import exit_code

if TYPE_CHECKING:
    from shoal._security import Credentials
    from shoal_worker.isolation import TrainerIsolation

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
TrainerMemory = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_TRAINER_MEMORY",
        min=0,
        metavar="BYTES",
        help="Limit of a trainer's private memory, in bytes. Shared memory and GPU memory do not count. A trainer "
        "needs about 200 MiB before it loads a program. 0 means no limit.",
    ),
]
TrainerOpenFiles = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_TRAINER_OPEN_FILES",
        min=0,
        help="Limit of a trainer's open files and sockets. 0 means the worker's own limit.",
    ),
]
TrainerProcesses = Annotated[
    int,
    typer.Option(
        envvar="SHOAL_TRAINER_PROCESSES",
        min=0,
        help="Limit of processes and threads of the user that trainers run as, counted over all processes of this user "
        "on this host. The system does not apply it to root. 0 means the worker's own limit.",
    ),
]
TrainerUserFlag = Annotated[
    str,
    typer.Option(
        "--trainer-user",
        envvar="SHOAL_TRAINER_USER",
        metavar="USER",
        help="User that trainers run as, by name or id. The worker must run as root, or have the capabilities to start "
        "processes of another user. Default: the worker's own user.",
    ),
]
TrainerTlsCertificate = Annotated[
    str,
    typer.Option(
        "--trainer-tls-cert",
        envvar="SHOAL_TRAINER_TLS_CERT",
        metavar="FILE",
        help="PEM file with the certificate that trainers present. It gives no rights: `shoal certs init` makes "
        "trainer.pem. Default: the worker's certificate, whose key programs can then read.",
    ),
]
TrainerTlsKey = Annotated[
    str,
    typer.Option(
        "--trainer-tls-key",
        envvar="SHOAL_TRAINER_TLS_KEY",
        metavar="FILE",
        help="PEM file with the private key of --trainer-tls-cert. It must belong to the user that trainers run as.",
    ),
]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker. Each field is an option, a `SHOAL_*` variable and a line of help."""

    coordinator: flags.Coordinator = ""
    name: flags.Name = ""
    device: DeviceFlag = "auto"
    device_memory_limit: DeviceMemoryLimit = 0.0
    path: Paths = None
    allow_program: flags.AllowPrograms = None
    trainer_env: flags.TrainerEnvironment = None
    trainer_memory: TrainerMemory = 0
    trainer_open_files: TrainerOpenFiles = 0
    trainer_processes: TrainerProcesses = 0
    trainer_user: TrainerUserFlag = ""
    trainer_tls_cert: TrainerTlsCertificate = ""
    trainer_tls_key: TrainerTlsKey = ""
    listen: flags.Listen = ""
    advertise: flags.Advertise = ""
    metrics_listen: flags.MetricsListen = flags.ANY_PORT
    retry_for: flags.RetryFor = 30.0
    grace_period: Grace = 30.0
    tls_ca: flags.TlsCa = ""
    tls_cert: flags.TlsCertificate = ""
    tls_key: flags.TlsKey = ""
    tls_client_certs: flags.TlsClientCertificates = "required"
    insecure: flags.Insecure = False
    log_format: flags.LogFormat = "console"
    log_level: flags.LogLevel = "info"
    supervised: flags.Supervised = False


def load() -> None:
    """Loads the code of a worker daemon, without threads: forks of this process then start at once."""
    from shoal._security import certificate_identity, tokens  # noqa: F401, PLC0415
    from shoal_worker import process  # noqa: F401, PLC0415


@command_of(WorkerOptions)
def worker(options: WorkerOptions) -> None:
    """Trains the jobs that the coordinator assigns, on one device."""
    from shoal._role.lifecycle import find_credentials, identify, run_role  # noqa: PLC0415
    from shoal_worker.allowed_programs import DEFAULT_PATTERNS  # noqa: PLC0415
    from shoal_worker.daemon import Daemon, WorkerConfig  # noqa: PLC0415
    from shoal_worker.isolation import hide_environment  # noqa: PLC0415
    from shoal_worker.process import start_worker  # noqa: PLC0415

    hide_environment()
    given = RoleIdentity(
        name=options.name, listen=options.listen, advertise=options.advertise, coordinator=options.coordinator
    )
    who = identify("worker", given, log_format=options.log_format, log_level=options.log_level)
    credentials = find_credentials("worker", options, (who.listen, options.metrics_listen))
    config = WorkerConfig(
        coordinator=who.coordinator,
        name=who.name,
        device=options.device,
        device_memory_limit=options.device_memory_limit,
        paths=tuple(str(folder.resolve()) for folder in options.path or [Path()]),
        allow_programs=tuple(options.allow_program or DEFAULT_PATTERNS),
        retry_for_s=options.retry_for,
        leave_grace_s=options.grace_period,
        listen=who.listen,
        advertise=who.advertise,
        isolation=_isolation(options, credentials),
        credentials=credentials,
    )
    with kernels.precompiled():
        run_role(
            "worker",
            lambda registry, metrics_address: start_worker(config, registry, metrics_address),
            metrics_listen=options.metrics_listen,
            advertise=who.advertise,
            leave=Daemon.leave,
            member=who.name,
            log_format=options.log_format,
            log_level=options.log_level,
            supervised=options.supervised,
            tls=credentials.tls,
            insecure=options.insecure,
        )


def _isolation(options: WorkerOptions, credentials: "Credentials") -> "TrainerIsolation":
    """Returns how trainers are isolated.

    Args:
        options: the options of the worker.
        credentials: what the worker presents.

    Raises:
        SystemExit: an option is invalid; the log has the reason.
    """
    from shoal_worker.isolation import TrainerIsolation, TrainerLimits, TrainerUser, trainer_tls  # noqa: PLC0415

    try:
        user = TrainerUser.find(options.trainer_user) if options.trainer_user else None
        return TrainerIsolation(
            tuple(options.trainer_env or ()),
            TrainerLimits(options.trainer_memory, options.trainer_open_files, options.trainer_processes),
            user,
            trainer_tls(credentials, options.trainer_tls_cert, options.trainer_tls_key, user),
        )
    except errors.BadRequest as error:
        structlog.get_logger(__name__).error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(exit_code(error)) from None

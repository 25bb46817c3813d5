"""The command `shoal coordinator`: its options and `SHOAL_*` variables."""

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from prometheus_client import CollectorRegistry

from shoal import errors
from shoal._limits import catalogue
from shoal._role import flags, lifecycle
from shoal._role.identity import RoleIdentity
from shoal._role.options import command_of
from shoal._security import Credentials

if TYPE_CHECKING:
    from shoal_coordinator.process import CoordinatorConfig


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options of a coordinator. Each field is an option, a `SHOAL_*` variable and a line of help."""

    listen: flags.CoordinatorListen = ""
    advertise: flags.Advertise = ""
    metrics_listen: flags.MetricsListen = flags.ANY_PORT
    store: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_STORE",
            help="File for the coordinator's state, used by one coordinator at a time. Its folder must exist. "
            "The value `memory` keeps the state in memory only.",
            show_default="~/.local/state/shoal/coordinator.db",
        ),
    ] = ""
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            envvar="SHOAL_HEARTBEAT_TIMEOUT", help="Seconds without a heartbeat after which a member counts as lost."
        ),
    ] = 5.0
    heartbeat_interval: Annotated[
        float,
        typer.Option(
            envvar="SHOAL_HEARTBEAT_INTERVAL",
            help="Shortest time in seconds between two heartbeats of a member. The value must be less than half of "
            "--heartbeat-timeout. In a large cluster the coordinator uses a longer interval: one second for each 340 "
            "members, but at most 10 s and at most a third of --heartbeat-timeout. That of a server is at most 4 s.",
        ),
    ] = 0.5
    keep_finished_jobs: Annotated[
        int,
        typer.Option(
            envvar="SHOAL_KEEP_FINISHED_JOBS",
            min=0,
            help="Number of ended jobs that the coordinator keeps with their variables. It also keeps this number of "
            "ended jobs without variables, such as jobs that failed before they ran. It forgets older jobs, but their "
            "checkpoints remain.",
        ),
    ] = 8
    max_jobs: Annotated[
        int, typer.Option(envvar="SHOAL_MAX_JOBS", min=1, help="Limit of jobs that have not ended.")
    ] = catalogue.MAX_LIVE_JOBS.default
    max_submitter_jobs: Annotated[
        int,
        typer.Option(
            envvar="SHOAL_MAX_SUBMITTER_JOBS", min=1, help="Limit of jobs of one submitter that have not ended."
        ),
    ] = catalogue.SUBMITTER_JOBS.default
    max_submitter_value_bytes: Annotated[
        int,
        typer.Option(
            envvar="SHOAL_MAX_SUBMITTER_VALUE_BYTES",
            min=0,
            help="Limit of the bytes of all variables of one submitter's jobs that have not ended. The value 0 means "
            "no limit.",
        ),
    ] = catalogue.SUBMITTER_VALUE_BYTES.default
    max_holder_members: Annotated[
        int,
        typer.Option(
            envvar="SHOAL_MAX_HOLDER_MEMBERS",
            min=1,
            help="Limit of the live servers, workers and sessions whose tokens or certificates have the same name.",
        ),
    ] = catalogue.HOLDER_MEMBERS.default
    max_job_variables: Annotated[
        int, typer.Option(envvar="SHOAL_MAX_JOB_VARIABLES", min=1, help="Limit of the variables of one job.")
    ] = catalogue.JOB_VARIABLES.default
    max_job_bytes: Annotated[
        int, typer.Option(envvar="SHOAL_MAX_JOB_BYTES", min=1, help="Limit of the bytes of all variables of one job.")
    ] = catalogue.JOB_BYTES.default
    audit_log: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_AUDIT_LOG",
            help="File for the audit log, or a folder for it. The value `none` means no log.",
            show_default="the store's path with .audit.jsonl, or none with --store memory",
        ),
    ] = ""
    checkpoints: flags.Checkpoints = ""
    server_return_timeout: Annotated[
        float,
        typer.Option(
            envvar="SHOAL_SERVER_RETURN_TIMEOUT",
            min=0,
            max=600,
            help="Seconds that jobs wait for a drained server to register again under its id.",
        ),
    ] = 60.0
    insecure: flags.Insecure = False
    page_listen: flags.PageListen = None
    page_hosts: flags.PageHosts = ""
    page_or_any: flags.PageOrAny = False
    page_read_only: flags.PageReadOnly = False
    tls_ca: flags.TlsCa = ""
    tls_cert: flags.TlsCertificate = ""
    tls_key: flags.TlsKey = ""
    tls_client_certs: flags.TlsClientCertificates = "required"
    log_format: flags.LogFormat = "console"
    log_level: flags.LogLevel = "info"
    supervised: flags.Supervised = False
    scratch: Annotated[Path | None, typer.Option(hidden=True, help="Folder to remove at a clean exit.")] = None

    def config(self, identity: RoleIdentity, credentials: Credentials) -> "CoordinatorConfig":
        """Returns the configuration of the coordinator.

        Args:
            identity: The addresses, from these options or from the environment.
            credentials: What the coordinator presents.

        Raises:
            BadRequest: The options contradict each other.
            StoreFailed: The folder of the default store cannot be created.
        """
        from shoal_coordinator.cluster import JobLimits  # noqa: PLC0415 - numpy is slow
        from shoal_coordinator.persistence import make_default_path  # noqa: PLC0415
        from shoal_coordinator.process import CoordinatorConfig  # noqa: PLC0415 - numpy is slow

        return CoordinatorConfig(
            listen=identity.listen,
            advertise=identity.advertise,
            store=self.store or str(make_default_path()),
            heartbeat_timeout_s=self.heartbeat_timeout,
            heartbeat_interval_s=self.heartbeat_interval,
            keep_finished=self.keep_finished_jobs,
            jobs=JobLimits(
                live_jobs=self.max_jobs,
                submitter_jobs=self.max_submitter_jobs,
                submitter_value_bytes=self.max_submitter_value_bytes,
                variables=self.max_job_variables,
                nbytes=self.max_job_bytes,
            ),
            holder_members=self.max_holder_members,
            checkpoints=self.checkpoints,
            server_return_s=self.server_return_timeout,
            secure=not self.insecure,
            audit_log=self.audit_log,
            page_listen=flags.page_listen(self.page_listen),
            page_hosts=tuple(filter(None, self.page_hosts.split(","))),
            page_or_any=self.page_or_any,
            page_read_only=self.page_read_only,
            credentials=credentials,
        )


def load() -> None:
    """Loads the code of a coordinator, without threads: forks of this process then start at once."""
    from shoal._security import certificate_identity, tokens  # noqa: F401, PLC0415
    from shoal_coordinator import page, process  # noqa: F401, PLC0415


@command_of(CoordinatorOptions)
def coordinator(options: CoordinatorOptions) -> None:
    """Runs the coordinator, which keeps the cluster's state: members, placement, jobs and the data ledger."""
    given = RoleIdentity(listen=options.listen, advertise=options.advertise)
    identity = lifecycle.identify("coordinator", given, log_format=options.log_format, log_level=options.log_level)
    listens = identity.listen, options.metrics_listen, flags.page_listen(options.page_listen)
    credentials = lifecycle.find_credentials("coordinator", options, listens)
    failures: list[errors.ShoalError] = []

    def fail(error: errors.ShoalError) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    def start(registry: CollectorRegistry, _metrics_address: str) -> lifecycle.Running:
        from shoal_coordinator.open_files import warn_of_few_files  # noqa: PLC0415
        from shoal_coordinator.process import start_coordinator  # noqa: PLC0415 - numpy is slow

        warn_of_few_files()
        return start_coordinator(options.config(identity, credentials), registry, fail)

    lifecycle.run_role(
        "coordinator",
        start,
        metrics_listen=options.metrics_listen,
        advertise=identity.advertise,
        supervised=options.supervised,
        tls=credentials.tls,
        insecure=options.insecure,
        log_format=options.log_format,
        log_level=options.log_level,
    )
    if failures:
        raise SystemExit(1)
    if options.scratch:
        shutil.rmtree(options.scratch, ignore_errors=True)

"""A coordinator and a server that ask for tokens, in this process, with tokens of every kind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

import shoal
from shoal import errors
from shoal._security import NO_CREDENTIALS, PERMISSIONS, AccessRole, Credentials, Principal
from shoal._security.tokens import TokenSigner
from shoal.session import Session
from shoal.v1 import job_pb2
from shoal_coordinator.access import Access
from shoal_coordinator.process import CoordinatorConfig, CoordinatorProcess, start_coordinator
from shoal_server.process import Server, ServerConfig
from support.certificates import credentials


@dataclass(frozen=True)
class SecureRig:
    """A running cluster that asks for tokens.

    Attributes:
        coordinator: the coordinator, on loopback.
        server: its server.
        access: the coordinator's tokens.
        signer: signs tokens with the coordinator's key.
        client: a client of this user, which finds its token by itself.
        session: a session of the job "job" with the variable "w" of three elements.
    """

    coordinator: CoordinatorProcess
    server: Server
    access: Access
    signer: TokenSigner
    client: shoal.Client
    session: Session

    @property
    def incarnation(self) -> int:
        """The incarnation of the session."""
        return next(each.incarnation for each in self.client.status().members if each.member == self.session.worker)

    def token(self, role: AccessRole, *, job: str = "", worker: str = "somebody", incarnation: int = 0) -> str:
        """Returns a valid token, or a ticket for a job."""
        return self.signer.sign(Principal(worker, role, "test", job, incarnation), valid_s=60)


@contextmanager
def secure_rig(server_audit_log: str = "", certificates: Path | None = None, **options: Any) -> Iterator[SecureRig]:
    """Starts the cluster, and stops it at the end of the block.

    Args:
        server_audit_log: the audit log of the server.
        certificates: a folder of certificates. With it, the cluster uses TLS.
        options: more of the coordinator's.
    """

    def presented(role: str) -> Credentials:
        return credentials(certificates, role) if certificates else NO_CREDENTIALS

    config = CoordinatorConfig(listen="127.0.0.1:0", secure=True, credentials=presented("coordinator"), **options)
    coordinator = start_coordinator(config, CollectorRegistry())
    try:
        server_config = ServerConfig(
            "server-0", coordinator.address, audit_log=server_audit_log, credentials=presented("server")
        )
        server = Server(server_config, CollectorRegistry())
        try:
            access = coordinator.access
            assert access is not None
            with shoal.Client(coordinator.address, credentials=presented("admin")) as client:
                session = client.session("job", variables={"w": np.zeros(3)})
                try:
                    yield SecureRig(coordinator, server, access, access.signer, client, session)
                finally:
                    with suppress(errors.Cancelled):  # tests cancel its job
                        session.close()
        finally:
            server.stop()
    finally:
        coordinator.stop()


def expired(rig: SecureRig, role: AccessRole) -> str:
    """Returns a token that expired an hour ago."""
    return rig.signer.sign(Principal("somebody", role, "test"), valid_s=-3_600)


def of_another_cluster(role: AccessRole) -> str:
    """Returns a token that another cluster's coordinator has signed."""
    return TokenSigner(TokenSigner.new_key(), time.time).sign(Principal("somebody", role, "test"), valid_s=60)


def calls_on_jobs(*, role: AccessRole, without: AccessRole = AccessRole.COORDINATOR) -> list[str]:
    """Returns the names of the calls of the service of jobs that one role may make and another may not."""
    service = "shoal.v1.Jobs/"
    return sorted(
        call.removeprefix(service)
        for call, roles in PERMISSIONS.items()
        if call.startswith(service) and role in roles and without not in roles
    )


def request_of(call: str, **fields: Any) -> Any:
    """Returns the request of a call of the service of jobs, with those of the fields that it has."""
    request = getattr(job_pb2, f"{call}Request")()
    for name, value in fields.items():
        if name in request.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
    return request

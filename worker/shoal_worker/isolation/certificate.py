"""Certificate of trainers: what the programs of a worker present with TLS, instead of the worker's certificate.

It gives no rights, because a trainer has those of its tickets. So a program that reads the key can do nothing that its
ticket does not allow, and a trainer of another user needs no access to the worker's key.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

from shoal import errors
from shoal._security import Credentials
from shoal_worker.isolation.user import TrainerUser

_CHECK_S = 60.0
_ADVICE = "`shoal certs init` makes trainer.pem and trainer-key.pem"


def trainer_tls(
    credentials: Credentials,
    certificate: str,
    key: str,
    user: TrainerUser | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[str, ...]:
    """Returns the paths of a trainer's files for TLS: the CA, the certificate and the key.

    Args:
        credentials: what the worker presents.
        certificate: the value of --trainer-tls-cert. Empty means that trainers present the worker's certificate.
        key: the value of --trainer-tls-key.
        user: the user that trainers run as; None means the worker's own.
        environment: the environment of the worker.

    Returns:
        The absolute paths; none if trainers present what the worker presents.

    Raises:
        BadRequest: the files are not valid, or trainers cannot read them.
    """
    if bool(certificate) != bool(key):
        raise errors.BadRequest(
            f"trainers have a certificate without a key, or a key without a certificate; give both --trainer-tls-cert "
            f"and --trainer-tls-key ({_ADVICE})"
        )
    another = user if user and user.uid != os.geteuid() else None
    if not credentials.tls:
        if certificate:
            raise errors.BadRequest(
                "--trainer-tls-cert is given, but this worker does not use TLS; give --tls-ca, --tls-cert and "
                "--tls-key, or leave --trainer-tls-cert and --trainer-tls-key out"
            )
        return ()
    if not certificate:
        if another:
            raise errors.BadRequest(
                f"--trainer-user is {another.name}, and trainers of this user must not read {credentials.tls.key}, the "
                f"key of the worker. Give trainers a certificate with --trainer-tls-cert and --trainer-tls-key "
                f"({_ADVICE})"
            )
        return ()
    paths = (str(credentials.tls.ca.absolute()), os.path.abspath(certificate), os.path.abspath(key))
    try:
        if another:
            _check_as(another, paths, environment)
        else:
            Credentials.find(*paths, environment={})
    except errors.BadRequest as error:
        raise errors.BadRequest(
            f"trainers cannot use the files of --tls-ca, --trainer-tls-cert and --trainer-tls-key: {error.message}"
        ) from None
    return paths


def check_files(*paths: str) -> None:
    """Ends this process with a reason if it cannot use files for TLS. `trainer_tls` calls it as another user."""
    try:
        Credentials.find(*paths, environment={})
    except errors.BadRequest as error:
        raise SystemExit(error.message) from None


def _check_as(user: TrainerUser, paths: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Raises BadRequest if a user cannot use the files. Only a process of this user meets all of its limits."""
    code = f"import sys; from {__name__} import check_files; check_files(*sys.argv[1:])"
    try:
        checked = subprocess.run(  # noqa: S603 - the command is ours
            [sys.executable, "-P", "-c", code, *paths],
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            cwd="/",
            env={name: environment[name] for name in ("PYTHONPATH", "SHOAL_FILE_ACCESS") if name in environment},
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise errors.BadRequest(f"user {user.name} cannot check them: {error}") from None
    if checked.returncode:
        reason = checked.stderr.strip().rpartition("\n")[2]
        raise errors.BadRequest(
            f"{reason}. User {user.name} has read them: let this user enter their folders, and own the key "
            f"(chown {user.name} {paths[-1]})"
        )


__all__ = ["check_files", "trainer_tls"]

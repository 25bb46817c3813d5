"""Access that the admin of a cluster gives to others, as the pages about engines describe."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import shoal
from shoal import errors
from shoal._security import Credentials


def check_colleagues_get_access(address: str, admin: Mapping[str, str], folder: Path) -> None:
    """Checks that the CA of a cluster issues certificates, and that its coordinator makes tokens.

    Args:
        address: host:port of the coordinator.
        admin: the variables that name the TLS files of an admin. The key of the CA is in the same folder.
        folder: folder for the new files.
    """
    ca = Path(admin["SHOAL_TLS_CA"])
    _shoal("certs", "issue", "reader", "ann", "--ca", str(ca.parent), "--out", str(folder), environment={})
    found = Credentials.find(str(ca), str(folder / "ann.pem"), str(folder / "ann-key.pem"))
    check_a_reader(address, found.with_token(lambda: ""))

    token, connection = folder / "ann-token", {**admin, "SHOAL_COORDINATOR": address}
    _shoal("token", "create", "ann", "--role", "reader", "--file", str(token), environment=connection)
    secret = token.read_text().strip()
    trainer = Credentials.find(str(ca), str(ca.with_name("trainer.pem")), str(ca.with_name("trainer-key.pem")))
    check_a_reader(address, trainer.with_token(lambda: secret))
    with (
        shoal.Client(address, retry_for_s=0.0, credentials=trainer.with_token(lambda: "")) as nobody,
        pytest.raises((errors.Forbidden, errors.Unauthenticated)),
    ):
        nobody.status()


def check_a_reader(address: str, credentials: Credentials) -> None:
    """Checks that a client may look at the cluster, and not submit jobs."""
    with shoal.Client(address, retry_for_s=0.0, credentials=credentials) as reader:
        assert reader.status().members
        with pytest.raises(errors.Forbidden):
            reader.submit(shoal.Job("digits:Digits"))


def _shoal(*arguments: str, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "shoal", *arguments]
    subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True)


__all__ = ["check_colleagues_get_access"]

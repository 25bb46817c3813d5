"""Token that the admin of a cluster gives to a reader, as the pages about engines describe."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import shoal
from shoal import errors
from shoal._security import Credentials


def check_a_reader_gets_a_token(address: str, admin: Mapping[str, str], folder: Path) -> None:
    """Checks that a reader needs the token and the CA only, and may not submit jobs.

    Args:
        address: host:port of the coordinator.
        admin: the variables that name the TLS files of an admin.
        folder: folder for the token.
    """
    file = folder / "token"
    command = [sys.executable, "-m", "shoal", "token", "create", "ann", "--role", "reader", "--file", str(file)]
    subprocess.run(command, env={**os.environ, **admin, "SHOAL_COORDINATOR": address}, check=True, capture_output=True)
    ca = Credentials.find(admin["SHOAL_TLS_CA"])
    secret = file.read_text().strip()
    with shoal.Client(address, retry_for_s=0.0, credentials=ca.with_token(lambda: secret)) as reader:
        assert reader.status().members
        with pytest.raises(errors.Forbidden):
            reader.submit(shoal.Job("digits:Digits"))


__all__ = ["check_a_reader_gets_a_token"]

"""The CA of a cluster on Ray, in a private folder of the driver, and the certificates that it issues."""

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal._engines import claim, release
from shoal._security import VARIABLES, Credentials


class ClusterCertificates:
    """The CA of one cluster. Its folder ends with this process, if nobody removes it before.

    Attributes:
        cluster: random id of the cluster.
    """

    def __init__(self) -> None:
        from shoal._security.certificates import make_certificates  # noqa: PLC0415 - cryptography is slow to import

        self.cluster = secrets.token_hex(8)
        self._folder = claim(f"shoal-{self.cluster}-driver", {}, 0)
        make_certificates(self._folder)

    @property
    def ca(self) -> bytes:
        """The certificate of the CA, in PEM."""
        return (self._folder / "ca.pem").read_bytes()

    @property
    def files(self) -> tuple[str, str, str]:
        """The files of the CA's certificate, of the admin's certificate and of its key."""
        return str(self._folder / "ca.pem"), str(self._folder / "admin.pem"), str(self._folder / "admin-key.pem")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that name these files to commands of `shoal`."""
        return dict(zip(VARIABLES, self.files, strict=True))

    @property
    def credentials(self) -> Credentials:
        """What an admin presents."""
        return Credentials.find(*self.files)

    def issue(self, role: str, name: str, hosts: Sequence[str]) -> tuple[bytes, bytes]:
        """Returns a new certificate and its key, in PEM, which this process keeps nowhere else.

        Args:
            role: the role of the holder.
            name: name of the holder.
            hosts: names and addresses of its hosts, besides localhost.
        """
        from shoal._security.certificates import issue_certificate  # noqa: PLC0415 - cryptography is slow to import

        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            certificate, key = issue_certificate(role, name, hosts, ca=self._folder, folder=Path(folder))
            return certificate.read_bytes(), key.read_bytes()

    def remove(self) -> None:
        """Removes the folder, with all keys."""
        release(self._folder)


__all__ = ["ClusterCertificates"]

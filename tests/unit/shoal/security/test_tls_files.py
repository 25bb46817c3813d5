"""TLS settings of a process: checks at its start, and files that are replaced while it runs."""

import datetime
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from structlog.testing import capture_logs

from shoal import errors
from shoal._security import NO_CREDENTIALS, AccessRole, Credentials
from shoal._security.certificates import make_certificates
from shoal._security.tls import TlsFiles
from support.certificates import replace_certificates, tls_files

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "certificates"
    make_certificates(made)
    return made


def missing(folder: Path) -> None:
    (folder / "server-key.pem").unlink()


def garbled(folder: Path) -> None:
    (folder / "server.pem").write_text("-----BEGIN CERTIFICATE-----\nno")


def another_key(folder: Path) -> None:
    shutil.copy(folder / "worker-key.pem", folder / "server-key.pem")


def another_ca(folder: Path) -> None:
    make_certificates(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "ca.pem", folder)


def open_key(folder: Path) -> None:
    (folder / "server-key.pem").chmod(0o644)


def at(days: float) -> Callable[[Path], None]:
    """Returns a fault: the certificates were made so many days from now."""

    def make_again(folder: Path) -> None:
        shutil.rmtree(folder)
        make_certificates(folder, now=NOW + datetime.timedelta(days=days))

    return make_again


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (missing, r"the key .*server-key\.pem cannot be read: No such file.*--tls-key or SHOAL_TLS_KEY"),
        (garbled, r"server\.pem has no certificate that can be read.*give a PEM file"),
        (another_key, r"server-key\.pem does not belong to the certificate .*server\.pem; give the key"),
        (another_ca, r"server\.pem was not issued by a CA in .*ca\.pem .*use the files of one `shoal certs init`"),
        (open_key, r"server-key\.pem is not private: .* has the mode 644, .* run: chmod 600"),
        (at(-366), r"server\.pem expired at .* UTC, 1\.0 days ago; make a new one, or set the clock .* fast by"),
        (at(-370), r"server\.pem expired at .* UTC, 5\.0 days ago"),
        (at(1), r"server\.pem is valid only from .* UTC, in 2[23]\.\d hours; set the clock .* slow by that much"),
    ],
)
def test_files_that_are_not_valid_are_refused(folder: Path, fault: Callable[[Path], None], message: str) -> None:
    fault(folder)
    with pytest.raises(errors.BadRequest, match=message):
        tls_files(folder)


def test_a_file_of_a_ca_with_other_text_in_it_is_read(folder: Path) -> None:
    pem = (folder / "ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes("Gültig".encode() + pem)  # no line of its own
    assert tls_files(folder).current().ca == pem


def test_the_group_may_read_a_key_where_roles_share_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "server-key.pem").chmod(0o640)
    with pytest.raises(errors.BadRequest, match="mode 640"):
        tls_files(folder)
    monkeypatch.setenv("SHOAL_FILE_ACCESS", "group")
    assert tls_files(folder).has_certificate


def test_replaced_files_are_used_and_half_replaced_ones_are_not(folder: Path, tmp_path: Path) -> None:
    tls = tls_files(folder)
    first = tls.current()
    assert tls.current() is first, "nothing has changed"
    make_certificates(tmp_path / "new", ca=folder)
    os.replace(tmp_path / "new" / "server.pem", folder / "server.pem")
    with capture_logs() as logs:
        assert tls.current() is first
    assert [(it["log_level"], "does not belong" in it["reason"]) for it in logs] == [("warning", True)]
    os.replace(tmp_path / "new" / "server-key.pem", folder / "server-key.pem")
    with capture_logs() as logs:
        second = tls.current()
    serial = x509.load_pem_x509_certificate(second.certificate).serial_number
    [(identity, expires)] = [(it["id"], it["expires"]) for it in logs]
    assert identity == f"cert:{serial:x}"
    assert expires.endswith(" UTC")
    assert second.certificate == (folder / "server.pem").read_bytes() != first.certificate


def test_replaced_files_are_used_if_they_are_all_new(folder: Path, tmp_path: Path) -> None:
    tls = tls_files(folder)
    first = tls.current()
    replace_certificates(folder, tmp_path / "new")
    assert tls.current() is not first


def test_credentials_come_from_options_and_then_from_the_environment(folder: Path) -> None:
    environment = {
        "SHOAL_TLS_CA": str(folder / "ca.pem"),
        "SHOAL_TLS_CERT": str(folder / "server.pem"),
        "SHOAL_TLS_KEY": str(folder / "server-key.pem"),
    }
    assert Credentials.find(environment={}) == NO_CREDENTIALS
    found = Credentials.find(environment=environment).tls
    assert found
    assert found.paths == tuple(environment.values())
    own = [str(folder / "worker.pem"), str(folder / "worker-key.pem")]
    given = Credentials.find("", *own, environment=environment).tls
    assert given
    assert given.paths[1:] == tuple(own)
    with pytest.raises(errors.BadRequest, match="but no CA; give --tls-ca"):
        Credentials.find("", own[0], environment={})
    with pytest.raises(errors.BadRequest, match="give both --tls-cert and --tls-key"):
        Credentials.find(str(folder / "ca.pem"), own[0], environment={})


@pytest.mark.parametrize(
    ("role", "certificate", "missing"),
    [
        (AccessRole.COORDINATOR, "server", r"coordinator\.role\.shoal\.internal"),
        (AccessRole.SERVER, "worker", r"server\.role\.shoal\.internal"),
    ],
)
def test_a_role_needs_a_certificate_that_names_it(
    folder: Path, role: AccessRole, certificate: str, missing: str
) -> None:
    paths = [str(folder / f"{name}.pem") for name in ("ca", certificate, f"{certificate}-key")]
    with pytest.raises(errors.BadRequest, match=rf"has no DNS name {missing}, .*`shoal certs init`.*`dnsNames` of"):
        Credentials.find(*paths, role=role)
    assert Credentials.find(*paths, role=AccessRole.WORKER).tls  # nobody calls a worker over gRPC


def test_a_new_certificate_that_does_not_name_the_role_is_not_used(folder: Path) -> None:
    tls = TlsFiles(*(folder / f"{name}.pem" for name in ("ca", "server", "server-key")), role=AccessRole.SERVER)
    first = tls.current()
    for end in (".pem", "-key.pem"):
        os.replace(folder / f"worker{end}", folder / f"server{end}")
    with capture_logs() as logs:
        assert tls.current() is first
    assert "has no DNS name server.role.shoal.internal" in logs[0]["reason"]


def test_a_role_needs_a_certificate(folder: Path) -> None:
    with pytest.raises(errors.BadRequest, match="a role needs a certificate for TLS; give --tls-cert"):
        TlsFiles(folder / "ca.pem").check_serves()

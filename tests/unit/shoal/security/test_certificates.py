"""Certificates that `shoal certs init` and `shoal certs issue` make."""

import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from shoal import errors
from shoal._cli.app import app
from shoal._security.certificate_identity import principal_in
from shoal._security.certificates import (
    CERTIFICATE_DAYS,
    ROLES,
    SERVING_ROLES,
    issue_certificate,
    make_certificates,
)
from shoal._security.principal import AccessRole
from shoal._security.tls import TlsFiles


def names_of(file: Path) -> x509.SubjectAlternativeName:
    return read(file).extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_every_role_gets_a_certificate_with_its_role_and_a_key_that_only_the_user_can_read(tmp_path: Path) -> None:
    files = make_certificates(tmp_path, ["*.servers.example", "10.1.2.3"])
    names = {"ca", *ROLES}
    assert {file.name for file in files} == {f"{name}{end}" for name in names for end in (".pem", "-key.pem")}
    assert {(tmp_path / f"{name}-key.pem").stat().st_mode & 0o777 for name in names} == {0o600}
    for role in ROLES:
        own = names_of(tmp_path / f"{role}.pem")
        assert own.get_values_for_type(x509.UniformResourceIdentifier) == [f"spiffe://shoal/{role}"]
        # A client's certificate with a host would let the client pose as a server.
        assert ("*.servers.example" in own.get_values_for_type(x509.DNSName)) == (role in SERVING_ROLES)
        addresses = own.get_values_for_type(x509.IPAddress)
        assert (ipaddress.ip_address("10.1.2.3") in addresses) == (role in SERVING_ROLES)


def test_a_host_of_one_role_is_only_in_its_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["server=server-0", "worker=10.1.2.3", "shared"])
    found = {role: names_of(tmp_path / f"{role}.pem") for role in ROLES}
    dns = {role: set(names.get_values_for_type(x509.DNSName)) for role, names in found.items()}
    assert {role for role in ROLES if "server-0" in dns[role]} == {"server"}
    assert {role for role in ROLES if "shared" in dns[role]} == set(SERVING_ROLES)
    address = ipaddress.ip_address("10.1.2.3")
    assert {role for role in ROLES if address in found[role].get_values_for_type(x509.IPAddress)} == {"worker"}


def test_the_name_of_a_role_is_only_in_its_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["worker=x.role.shoal.internal"])
    dns = {role: names_of(tmp_path / f"{role}.pem").get_values_for_type(x509.DNSName) for role in ROLES}
    named = {role: {name for name in names if "role.shoal.internal" in name} for role, names in dns.items()}
    expected: dict[str, set[str]] = {role: set() for role in ROLES}
    for role in ("coordinator", "server"):
        expected[role] = {f"{role}.role.shoal.internal"}
    assert named == expected | {"worker": {"x.role.shoal.internal"}}  # as the caller asked in as many words


@pytest.mark.parametrize("host", [f"{name}.shoal.internal" for name in ("server.role", "*.role", "role", "A.ROLE")])
def test_a_name_of_a_role_is_not_given_to_all_roles(tmp_path: Path, host: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"is a name of a role, .* need ROLE=NAME"):
        make_certificates(tmp_path, [host])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("host", ["reader=a", "=a", "a=b", "server=a=b"])
def test_a_host_of_a_role_without_hosts_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"write NAME or ROLE=NAME, with one of the roles coordinator, server"):
        make_certificates(tmp_path, [host])
    assert not [*tmp_path.iterdir()]


def test_certificates_are_valid_for_the_documented_time(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    certificate = read(tmp_path / "server.pem")
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == CERTIFICATE_DAYS


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "worker-key.pem").write_text("mine")
    with pytest.raises(errors.BadRequest, match=r"worker-key\.pem exists already.* another folder"):
        make_certificates(tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("worker-key.pem", "mine")]


def test_an_earlier_ca_issues_new_certificates(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_certificates(old)
    make_certificates(new, ca=old)
    read(new / "server.pem").verify_directly_issued_by(read(old / "ca.pem"))
    assert (new / "server.pem").read_bytes() != (old / "server.pem").read_bytes()


@pytest.mark.parametrize("host", ["a:1", "http://a", "", "a b", "ä"])
def test_what_is_not_a_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(errors.BadRequest, match="is not a host; give a name or an address without a port"):
        make_certificates(tmp_path, [host])
    assert not [*tmp_path.iterdir()]


def test_another_submitter_gets_a_certificate_with_its_own_name(tmp_path: Path) -> None:
    ca = tmp_path / "certs"
    make_certificates(ca)
    result = CliRunner().invoke(app, ["certs", "issue", "submitter", "ann", "--ca", str(ca), "--days", "30"])
    assert result.exit_code == 0, result.output
    certificate = ca / "ann.pem"
    caller = principal_in(certificate.read_bytes())
    assert (caller.name, caller.role) == ("ann", AccessRole.SUBMITTER)
    names = names_of(certificate)
    assert not names.get_values_for_type(x509.DNSName), "a client's certificate names no host"
    assert not names.get_values_for_type(x509.IPAddress)
    assert (ca / "ann-key.pem").stat().st_mode & 0o777 == 0o600
    found = read(certificate)
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 30
    TlsFiles(ca / "ca.pem", certificate, ca / "ann-key.pem")  # they fit together


def test_a_folder_for_a_colleague_has_all_that_a_client_needs(tmp_path: Path) -> None:
    ca, folder = tmp_path / "certs", tmp_path / "ann"
    make_certificates(ca)
    issue = ["certs", "issue", "submitter", "--ca", str(ca), "--out", str(folder)]
    result = CliRunner().invoke(app, [*issue, "ann"])
    assert result.exit_code == 0, result.output
    assert f"SHOAL_TLS_CA={folder}/ca.pem" in result.output
    assert {file.name for file in folder.iterdir()} == {"ca.pem", "ann.pem", "ann-key.pem"}
    TlsFiles(folder / "ca.pem", folder / "ann.pem", folder / "ann-key.pem")
    assert CliRunner().invoke(app, [*issue, "bob"]).exit_code == 0, "the same CA stays"
    other = tmp_path / "other"
    make_certificates(other)
    refused = CliRunner().invoke(app, ["certs", "issue", "reader", "eve", "--ca", str(other), "--out", str(folder)])
    assert refused.exit_code == 2
    assert "a new folder with --out" in refused.output
    assert not (folder / "eve.pem").exists()


def test_the_worker_of_another_host_gets_a_certificate_of_this_host(tmp_path: Path) -> None:
    ca, folder = tmp_path / "certs", tmp_path / "node-2"
    make_certificates(ca)
    files = issue_certificate("worker", "gpu-2", ["node-2.example", "10.0.0.2"], ca=ca, folder=folder)
    assert files == [folder / "gpu-2.pem", folder / "gpu-2-key.pem"]
    names = names_of(folder / "gpu-2.pem")
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "node-2.example"]
    assert ipaddress.ip_address("10.0.0.2") in names.get_values_for_type(x509.IPAddress)
    assert principal_in((folder / "gpu-2.pem").read_bytes()).role is AccessRole.WORKER


def test_all_roles_of_one_machine_get_a_certificate_without_a_change_of_the_servers(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = issue_certificate("up", "up", ["node-1.example"], ca=tmp_path)
    for role in (AccessRole.COORDINATOR, AccessRole.SERVER, AccessRole.WORKER):
        TlsFiles(tmp_path / "ca.pem", *files, role=role).check_serves()
    names = names_of(files[0]).get_values_for_type(x509.DNSName)
    assert names == ["coordinator.role.shoal.internal", "server.role.shoal.internal", "localhost", "node-1.example"]
    assert principal_in(files[0].read_bytes()).role is AccessRole.SERVER
    others = names_of(tmp_path / "server.pem").get_values_for_type(x509.DNSName)
    assert "coordinator.role.shoal.internal" not in others


def test_a_ca_whose_key_others_can_read_issues_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / "ca-key.pem").chmod(0o644)
    for command in (["issue", "reader", "ann"], ["init", str(tmp_path / "new")]):
        result = CliRunner().invoke(app, ["certs", *command, "--ca", str(tmp_path)])
        assert result.exit_code, result.output
        with pytest.raises(errors.BadRequest, match=r"the key of the CA .*ca-key.pem is not private.* the mode 644"):
            issue_certificate("reader", "ann", ca=tmp_path)
    assert not {"ann.pem", "new"} & {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("role", "name", "hosts", "days", "reason"),
    [
        ("root", "ann", [], 30, "'root' is not a role; use one of: coordinator, server"),
        ("submitter", "local", [], 30, "not local .the processes of the coordinator's user"),
        ("reader", "Ann", [], 30, "cannot be the name of a certificate's holder: give 1 to 63"),
        ("reader", "../ann", [], 30, "cannot be the name"),
        ("reader", "ca", [], 30, "but not ca"),
        ("reader", "ann-key", [], 30, "ends with -key"),
        ("reader", "ann", ["node-1"], 30, "the role reader names no hosts.*leave out --host"),
        ("worker", "ann", ["a:1"], 30, "is not a host"),
        ("worker", "ann", ["server.role.shoal.internal"], 30, "is a name of a role, not of a host"),
        ("worker", "ann", [], 0, "cannot be valid for 0 days; give 1 to 3650"),
        ("worker", "server", [], 30, r"server\.pem exists already.*choose another name, or a new folder with --out"),
    ],
)
def test_a_certificate_that_cannot_be_issued(
    tmp_path: Path, role: str, name: str, hosts: list[str], days: int, reason: str
) -> None:
    make_certificates(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(errors.BadRequest, match=reason):
        issue_certificate(role, name, hosts, ca=tmp_path, days=days)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

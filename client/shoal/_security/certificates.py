"""Development certificates: a CA, and certificates and keys, as `shoal certs init` and `shoal certs issue` write them.

A certificate carries its role as a URI (`spiffe://shoal/server`), and the hosts of its process as DNS names and
addresses. The common name is the name of its holder. A URI cannot be mistaken for a host, and cert-manager issues such
certificates as well. Those of a coordinator and of a server also have the DNS name by which clients know the role
(`role_names`).
"""

import datetime
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal import errors
from shoal._security.certificate_identity import ROLE_URI
from shoal._security.principal import LOCAL_HOLDER, AccessRole, can_hold
from shoal._security.role_names import NAMED_ROLES, ROLE_DOMAIN, is_role_name, role_name
from shoal._system import private_files

CA_DAYS, CERTIFICATE_DAYS = 3650, 365
# Roles whose processes accept connections. Only their certificates name hosts, so that no other holder can act as one.
SERVING_ROLES = ("coordinator", "server", "worker")
# The certificate of a trainer gives no rights: only tickets say what trainers may do.
ROLES = (*SERVING_ROLES, "trainer", "admin", "submitter", "reader")
# Holder of the one certificate that all roles of `shoal up` share: a server's, which also names the coordinator.
UP = "up"
# A certificate is valid a little before it is made, for machines whose clocks are slow.
_CLOCK_SLACK = datetime.timedelta(hours=1)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CA = "ca"


@dataclass(frozen=True, slots=True)
class _Issuer:
    """A CA with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path, hosts: Iterable[str] = (), *, ca: Path | None = None, now: datetime.datetime | None = None
) -> list[Path]:
    """Writes NAME.pem and NAME-key.pem for a CA and for each role. Only this user can read the keys.

    Args:
        folder: folder for the files; it is created if it does not exist.
        hosts: names and addresses of the hosts of the cluster, beside localhost and this machine's name. ROLE=NAME is
            only in the certificate of this role. A name of a role needs this form.
        ca: folder with ca.pem and ca-key.pem of an earlier call; this CA then issues the certificates. If it is None,
            the function makes a new CA.
        now: the current time. None means that the clock gives it.

    Returns:
        The files.

    Raises:
        BadRequest: a file exists already, a host is invalid, the CA cannot be read, or the folder cannot be written.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    names = _names_of_roles([*_LOCAL_HOSTS, socket.gethostname(), *hosts])
    issuer = _read_ca(ca) if ca else _make_ca(now)
    contents = {f"{_CA}.pem": _pem(issuer.certificate), f"{_CA}-key.pem": _key_pem(issuer.key)}
    for role in ROLES:
        contents |= _issue(issuer, role, role, names.get(role, []), now)
    return _write_all(folder, contents, "name another folder")


def issue_certificate(
    role: str,
    name: str,
    hosts: Sequence[str] = (),
    *,
    ca: Path,
    folder: Path | None = None,
    days: int = CERTIFICATE_DAYS,
    now: datetime.datetime | None = None,
    with_ca: bool = False,
) -> list[Path]:
    """Writes NAME.pem and NAME-key.pem of one more holder. Only this user can read the key.

    Args:
        role: coordinator, server, worker, trainer, admin, submitter or reader; or up, for all roles of `shoal up`.
        name: name of the holder, by which the cluster knows it: 1 to 63 characters of a-z, 0-9 and -, but not `local`.
        hosts: names and addresses of the hosts of the holder's process, besides localhost.
        ca: folder with ca.pem and ca-key.pem, from `make_certificates`.
        folder: folder for the files; it is created if it does not exist. None means the folder of the CA.
        days: days until the certificate expires.
        now: the current time. None means that the clock gives it.
        with_ca: whether to write ca.pem, too, if the folder does not have it. It must not have that of another CA.

    Returns:
        The files that were written.

    Raises:
        BadRequest: a file exists already, the role, the name, the days or a host is invalid, the CA cannot be read, or
            the folder cannot be written.
    """
    if role not in (*ROLES, UP):
        raise errors.BadRequest(f"{role!r} is not a role; use one of: {', '.join((*ROLES, UP))}", role=role)
    serves = role in (*SERVING_ROLES, UP)
    # The name of the holder is also the name of its files, so it must not end like that of a key.
    if not can_hold(name) or name == _CA or name.startswith("-") or name.endswith("-key"):
        raise errors.BadRequest(
            f"{name!r:.80} cannot be the name of a certificate's holder: give 1 to 63 characters of a-z, 0-9 and -, "
            f"but not {_CA}, not {LOCAL_HOLDER} (the processes of the coordinator's user), and not a name that ends "
            "with -key",
        )
    if hosts and not serves:
        raise errors.BadRequest(
            f"a certificate of the role {role} names no hosts, because its holder accepts no connections; leave out "
            "--host",
            role=role,
        )
    if not 1 <= days <= CA_DAYS:
        raise errors.BadRequest(f"a certificate cannot be valid for {days} days; give 1 to {CA_DAYS}", days=days)
    if named := list(filter(is_role_name, hosts)):
        raise errors.BadRequest(
            f"{named[0]!r} is a name of a role, not of a host; leave it out, because the certificates of coordinators "
            "and servers have it by themselves, or add that of another role with `shoal certs init --host ROLE=NAME`",
            host=named[0],
        )
    own = dict.fromkeys([*_LOCAL_HOSTS, *hosts]) if serves else ()
    names = [_alternative_name(host) for host in own]
    now = now or datetime.datetime.now(datetime.UTC)
    issued = _issue(_read_ca(ca), role, name, names, now, days)
    copied = _missing_ca(ca, folder or ca) if with_ca else {}
    return _write_all(folder or ca, issued | copied, "choose another name, or a new folder with --out")


def _missing_ca(ca: Path, folder: Path) -> dict[str, bytes]:
    """Returns the certificate of the CA by its file name, unless the folder has the same one already."""
    name = f"{_CA}.pem"
    try:
        content = (ca / name).read_bytes()
        there = (folder / name).read_bytes() if (folder / name).exists() else b""
    except OSError as error:
        raise errors.BadRequest(f"cannot read {name}: {error}; name another folder", folder=folder) from None
    return {} if there == content else {name: content}


def _write_all(folder: Path, contents: Mapping[str, bytes], advice: str) -> list[Path]:
    """Writes new files to a folder. Raises BadRequest, and writes none of them, if one exists already."""
    try:
        private_files.make_folder(folder)
        if existing := [name for name in contents if (folder / name).exists()]:
            raise errors.BadRequest(
                f"{folder / existing[0]} exists already, and is not overwritten; {advice}", file=existing[0]
            )
        return [_write(folder / name, content) for name, content in contents.items()]
    except OSError as error:
        raise errors.BadRequest(
            f"cannot write certificates to {folder}: {error.strerror}; name a folder that you may write to",
            folder=folder,
        ) from None


def _make_ca(now: datetime.datetime) -> _Issuer:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Shoal development CA")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Issuer(certificate, key)


def _read_ca(folder: Path) -> _Issuer:
    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{_CA}.pem").read_bytes())
        key_pem = private_files.read_secret("the key of the CA", folder / f"{_CA}-key.pem", errors.BadRequest)
        key = serialization.load_pem_private_key(key_pem, None)
    except (OSError, ValueError) as error:
        raise errors.BadRequest(
            f"cannot read the CA in {folder}: {error}; name a folder with the ca.pem and ca-key.pem of an earlier "
            "`shoal certs init`",
            folder=folder,
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise errors.BadRequest(f"ca-key.pem in {folder} is not the key of ca.pem; restore both files", folder=folder)
    return _Issuer(certificate, key)


def _issue(
    issuer: _Issuer,
    role: str,
    holder: str,
    names: Sequence[x509.GeneralName],
    now: datetime.datetime,
    days: int = CERTIFICATE_DAYS,
) -> dict[str, bytes]:
    """Returns the contents of the files of a new certificate and its key, by their names."""
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in (*SERVING_ROLES, UP):
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    own = [x509.DNSName(role_name(each)) for each in NAMED_ROLES if role in (each.value, UP)]
    access_role = AccessRole.SERVER.value if role == UP else role
    alternatives = [x509.UniformResourceIdentifier(f"{ROLE_URI}{access_role}"), *own, *names]
    certificate = (
        _builder(_name(holder), issuer.certificate.subject, key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), critical=False)
        .sign(issuer.key, hashes.SHA256())
    )
    return {f"{holder}.pem": _pem(certificate), f"{holder}-key.pem": _key_pem(key)}


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _names_of_roles(hosts: Iterable[str]) -> dict[str, list[x509.GeneralName]]:
    """Returns the hosts for the certificate of each role that accepts connections."""
    names: dict[str, list[x509.GeneralName]] = {role: [] for role in SERVING_ROLES}
    for given in dict.fromkeys(hosts):
        only, equals, host = given.rpartition("=")
        if equals and only not in SERVING_ROLES:
            raise errors.BadRequest(
                f"{given!r} does not begin with a role whose certificate names hosts; write NAME or ROLE=NAME, with "
                f"one of the roles {', '.join(SERVING_ROLES)}",
                host=given,
            )
        name = _alternative_name(host)
        if is_role_name(host) and not equals:
            raise errors.BadRequest(
                f"{host!r} is a name of a role, and every process whose certificate has it can act as this role; names "
                f"in {ROLE_DOMAIN} need ROLE=NAME",
                host=given,
            )
        for role in [only] if equals else SERVING_ROLES:
            names[role].append(name)
    return names


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or not host.isascii() or any(character in "/:@ " for character in host):
        raise errors.BadRequest(
            f"{host!r} is not a host; give a name or an address without a port, such as node-1.example", host=host
        )
    return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(file: Path, content: bytes) -> Path:
    """Creates a file. Only this user can read a key; all users can read a certificate."""
    mode = 0o600 if file.stem.endswith("-key") else 0o644
    with open(private_files.create(file, mode), "wb") as opened:
        opened.write(content)
    return file


__all__ = ["CA_DAYS", "CERTIFICATE_DAYS", "ROLES", "SERVING_ROLES", "UP", "issue_certificate", "make_certificates"]

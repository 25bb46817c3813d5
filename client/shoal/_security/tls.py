"""TLS settings of a process: its certificate, its key and the CAs that it trusts, read again when the files change."""

import contextlib
import datetime
import os
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from shoal import errors
from shoal._security.certificate_identity import DAMAGED, alternative_names
from shoal._security.principal import ID_PREFIX, AccessRole
from shoal._security.role_names import NAMED_ROLES, role_name
from shoal._system import private_files
from shoal._system.logs import Log

T = TypeVar("T")
_log = Log(__name__)

# Attempts to read files while another process replaces them.
_READS = 3
_PUBLIC = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
# Lanes use TLS 1.2, in which Python can choose AES-128-GCM: it takes a quarter less time than AES-256-GCM, which comes
# first in TLS 1.3. Both ends are Shoal's, so no other cipher is needed. The key exchange has forward secrecy.
_LANE_CIPHERS = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256"


@dataclass(frozen=True, slots=True)
class Validity:
    """The time for which a certificate is valid.

    Attributes:
        file: the file of the certificate.
        begins_at, ends_at: Unix times in seconds.
    """

    file: Path
    begins_at: float
    ends_at: float


@dataclass(frozen=True, slots=True, eq=False)
class TlsMaterial:
    """The content of the files at one time.

    Attributes:
        ca, certificate, key: PEM. The last two are empty for a client without a certificate.
        lane_server: context for lanes that this process accepts; None without a certificate.
        lane_client: context for lanes that this process opens, and for probes.
        web: context for HTTP, which trusts the CAs for the certificates of clients; None without a certificate.
        validity: that of the certificate, or that of its CA if it ends earlier; None without a certificate.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    lane_server: ssl.SSLContext | None
    lane_client: ssl.SSLContext
    web: ssl.SSLContext | None
    validity: Validity | None


class TlsFiles:
    """The files of a process for TLS. Each new connection uses their current content. Thread-safe.

    The constructor checks the files. If files that were replaced later are not valid together, for example because only
    one of them was replaced so far, the earlier content stays in use, and the log has the reason.

    Args:
        ca: file with the certificates of the trusted CAs.
        certificate: file with the certificate of this process, followed by the certificates of intermediate CAs. Empty
            for a client without a certificate.
        key: file with the key of the certificate. Only the owner may be able to read it.
        client_certificates: whether servers of this process require a certificate of each client.
        role: access role in which this process serves. Its certificate must name the role if clients check that. None
            for a client.

    Raises:
        BadRequest: a file is missing or not valid; the certificate is expired, not valid yet or from another CA, or
            does not name the role; the key belongs to another certificate; or other users can read the key.
    """

    def __init__(
        self,
        ca: str | Path,
        certificate: str | Path = "",
        key: str | Path = "",
        *,
        client_certificates: bool = True,
        role: AccessRole | None = None,
    ) -> None:
        if bool(certificate) != bool(key):
            raise errors.BadRequest(
                "TLS has a certificate without a key, or a key without a certificate; give both --tls-cert and "
                "--tls-key, or SHOAL_TLS_CERT and SHOAL_TLS_KEY"
            )
        self.ca, self.certificate, self.key = Path(ca), Path(certificate), Path(key)
        self.client_certificates, self._role = client_certificates, role
        self._files = [self.ca, self.certificate, self.key] if certificate else [self.ca]
        self._lock = threading.Lock()  # guards _stamp and _material; held while the files are read
        self._stamp = self._stamp_now()
        self._material = self._read()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files, absolute, so that another process can open them."""
        return tuple(str(file.absolute()) for file in self._files)

    @property
    def has_certificate(self) -> bool:
        """Whether this process has a certificate. Without one, it can be a client only."""
        return len(self._files) > 1

    def check_serves(self) -> None:
        """Raises BadRequest if this process has no certificate. A server needs one."""
        if not self.has_certificate:
            raise errors.BadRequest(
                "a role needs a certificate for TLS; give --tls-cert and --tls-key, or SHOAL_TLS_CERT and SHOAL_TLS_KEY"
            )

    def current(self) -> TlsMaterial:
        """Returns the content of the files. They are read again if they have changed."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._material = self._read()
                except errors.BadRequest as error:
                    _log.warning("new certificate files are not used; the earlier ones stay", reason=error.message)
                else:
                    _log.info("certificate files were read again", **self._description(self._material))
            return self._material

    def _description(self, material: TlsMaterial) -> dict[str, str]:
        """Returns what identifies the certificate in the log: `cert:SERIAL` as `shoal token revoke` takes it."""
        if not material.certificate:
            return {"ca": str(self.ca)}
        own = _certificates(material.certificate, self.certificate)[0]
        return {
            "certificate": str(self.certificate),
            "id": f"{ID_PREFIX}{own.serial_number:x}",
            "expires": _text(own.not_valid_after_utc),
        }

    def _stamp_now(self) -> tuple[tuple[int, int, int], ...]:
        """Returns a value that changes when a file changes or disappears."""
        stamp = []
        for file in self._files:
            with contextlib.suppress(OSError):
                found = os.stat(file)
                stamp.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return tuple(stamp)

    def _read(self) -> TlsMaterial:
        for attempt in range(_READS):
            before = self._stamp_now()
            try:
                material = self._checked()
            except errors.BadRequest:
                if before == self._stamp_now() or attempt == _READS - 1:
                    raise
                continue
            if before == self._stamp_now():
                self._stamp = before
                return material
        return material

    def _checked(self) -> TlsMaterial:
        authorities = _certificates(_read(self.ca, "the CA's certificate", "--tls-ca or SHOAL_TLS_CA"), self.ca)
        # Written again, because `cryptography` reads files that OpenSSL and gRPC would not read.
        ca = b"".join(each.public_bytes(serialization.Encoding.PEM) for each in authorities)
        client = _context(ssl.PROTOCOL_TLS_CLIENT, ca, self.ca)
        if not self.has_certificate:
            return TlsMaterial(ca, b"", b"", None, client, None, None)
        certificate = _read(self.certificate, "the certificate", "--tls-cert or SHOAL_TLS_CERT")
        key = _read(self.key, "the key", "--tls-key or SHOAL_TLS_KEY", secret=True)
        validity = self._check_certificate(_certificates(certificate, self.certificate), key, authorities)
        server = _context(ssl.PROTOCOL_TLS_SERVER, ca, self.ca)
        server.verify_mode = ssl.CERT_REQUIRED if self.client_certificates else ssl.CERT_OPTIONAL
        web = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        web.minimum_version = ssl.TLSVersion.TLSv1_2
        _trust(web, ca, self.ca)
        for context in (client, server, web):
            try:
                context.load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:  # replaced since they were read, or refused by OpenSSL only
                raise errors.BadRequest(
                    f"the certificate {self.certificate} and the key {self.key} cannot be used: {error}; replace both",
                    file=self.certificate,
                ) from None
        return TlsMaterial(ca, certificate, key, server, client, web, validity)

    def _check_certificate(
        self, chain: Sequence[x509.Certificate], key: bytes, authorities: Sequence[x509.Certificate]
    ) -> Validity:
        """Raises BadRequest if the certificate cannot be used. Returns the validity of the one that expires first."""
        own = chain[0]
        try:
            public = serialization.load_pem_private_key(key, None).public_key().public_bytes(*_PUBLIC)
        except (ValueError, TypeError) as error:
            raise errors.BadRequest(
                f"the key {self.key} cannot be read: {error}; give a PEM file with a key without a password",
                file=self.key,
            ) from None
        if public != own.public_key().public_bytes(*_PUBLIC):
            raise errors.BadRequest(
                f"the key {self.key} does not belong to the certificate {self.certificate}; give the key that was made "
                "with this certificate",
                file=self.key,
            )
        validity = _check_dates(own, self.certificate)
        issuer = _issuer(own, chain[1:], authorities)
        if issuer is None:
            raise errors.BadRequest(
                f"the certificate {self.certificate} was not issued by a CA in {self.ca} (its issuer is "
                f"{own.issuer.rfc4514_string()}); use the files of one `shoal certs init`",
                file=self.certificate,
            )
        validity = min(validity, _check_dates(issuer, self.ca), key=lambda each: each.ends_at)
        if self._role in NAMED_ROLES and role_name(self._role) not in _dns_names(own, self.certificate):
            raise errors.BadRequest(
                f"the certificate {self.certificate} has no DNS name {role_name(self._role)}, which clients expect of "
                f"a {self._role.value}; use the files of this role from `shoal certs init`, or add the name "
                "(`dnsNames` of cert-manager)",
                file=self.certificate,
            )
        return validity


def _read(file: Path, what: str, option: str, *, secret: bool = False) -> bytes:
    try:
        return private_files.read_secret(what, file, errors.BadRequest) if secret else file.read_bytes()
    except OSError as error:
        raise errors.BadRequest(
            f"{what} {file} cannot be read: {error.strerror}; name the file with {option}, or make one with `shoal "
            "certs init`",
            file=file,
        ) from None


def _certificates(pem: bytes, file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except DAMAGED as error:
        raise errors.BadRequest(
            f"{file} has no certificate that can be read: {error}; give a PEM file", file=file
        ) from None


def _dns_names(certificate: x509.Certificate, file: Path) -> list[str]:
    try:
        return alternative_names(certificate, x509.DNSName)
    except DAMAGED as error:
        raise errors.BadRequest(
            f"the names in the certificate {file} cannot be read: {error}; make another one", file=file
        ) from None


def _check_dates(certificate: x509.Certificate, file: Path) -> Validity:
    now = datetime.datetime.now(datetime.UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        raise errors.BadRequest(
            f"the certificate {file} is valid only from {_text(begin)}, in {_duration(begin - now)}; set the clock of "
            f"this machine if it is slow by that much (it says {_text(now)}), or make a new certificate",
            file=file,
        )
    if now > end:
        raise errors.BadRequest(
            f"the certificate {file} expired at {_text(end)}, {_duration(now - end)} ago; make a new one, or set the "
            f"clock of this machine if it is fast by that much (it says {_text(now)})",
            file=file,
        )
    return Validity(file, begin.timestamp(), end.timestamp())


def _text(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def _duration(time: datetime.timedelta) -> str:
    hours = time.total_seconds() / 3600
    return f"{hours / 24:.1f} days" if hours >= 24 else f"{hours:.1f} hours"


def _issuer(
    certificate: x509.Certificate, between: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> x509.Certificate | None:
    """Returns the trusted CA at the end of a certificate's chain, or None."""
    for each in authorities:
        if _issued(certificate, each):
            return each
    for number, each in enumerate(between):
        if _issued(certificate, each):
            return _issuer(each, [*between[:number], *between[number + 1 :]], authorities)
    return None


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _context(protocol: int, ca: bytes, file: Path) -> ssl.SSLContext:
    """Returns a context for lanes, without a certificate."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_LANE_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    _trust(context, ca, file)
    return context


def _trust(context: ssl.SSLContext, ca: bytes, file: Path) -> None:
    """Makes a context trust a CA. OpenSSL refuses some certificates that `cryptography` reads."""
    try:
        context.load_verify_locations(cadata=ca.decode())
    except (ValueError, ssl.SSLError) as error:
        raise errors.BadRequest(
            f"OpenSSL cannot use the CA's certificate {file}: {error}; make another one", file=file
        ) from None


__all__ = ["TlsFiles", "TlsMaterial", "Validity"]

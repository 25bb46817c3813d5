"""Fuzz targets of what proves an identity: tokens and tickets, the files that hold them, and certificates."""

import base64
import datetime
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal import errors
from shoal._security import AccessFile, AccessRole, Authorizer, CopyGrant, Principal, TokenSource, token_in
from shoal._security.certificate_identity import ROLE_URI, principal_in
from shoal._security.port_check import PortCheck
from shoal._security.tls import TlsFiles
from shoal._security.tokens import TokenSigner, TokenVerifier, server_audience
from support.fuzzing.campaign import Target
from support.fuzzing.mutator import mutated

# Fixed, so that a number reproduces an input, and a kept input is what it was.
_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_NOW = 1.8e9
_ADDRESS = "127.0.0.1:7070"
_REFUSALS = (errors.Unauthenticated, errors.Forbidden, errors.BadRequest)


def _all_of(*calls: Callable[[], object]) -> None:
    """Makes all calls. A refusal of one does not hide what the next one does."""
    for call in calls:
        with suppress(*_REFUSALS):
            call()


def _encode(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _signed(header: bytes, claims: bytes) -> bytes:
    """Returns a token of this cluster with any header and claims."""
    text = _encode(header) + b"." + _encode(claims)
    return text + b"." + _encode(_KEY.sign(text))


class Tokens:
    """Tokens, tickets, logins and grants: as a server, the page and a client decode them."""

    name = "tokens"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        signer = TokenSigner(bytes(range(32)), lambda: _NOW)
        admin, worker = Principal("ann", AccessRole.ADMIN, "t"), AccessRole.WORKER
        self._copy = CopyGrant("job", 1, 2, 3, "p", 4)
        self._seeds = [
            self._copy.signed(signer, "s", 5).encode(),
            signer.sign(admin, valid_s=60).encode(),
            signer.sign(admin, valid_s=60, audience="page").encode(),
            signer.sign(admin, valid_s=-1).encode(),
            signer.sign(Principal("w", worker, "t", "job", 3, expires_at=_NOW + 90), valid_s=60).encode(),
            signer.sign(Principal("c", AccessRole.COORDINATOR), valid_s=60, audience=server_audience("s")).encode(),
        ]
        parts = [[base64.urlsafe_b64decode(part + b"==") for part in seed.split(b".")[:2]] for seed in self._seeds]
        self._headers, self._claims = zip(*parts, strict=True)
        self._verifiers = [TokenVerifier(signer.public_key, lambda: _NOW, server=server) for server in ("", "s")]
        self._authorizer = Authorizer(self._verifiers[0])
        self._check = PortCheck(_ADDRESS, listeners=lambda _host, _port: frozenset({2**31}))

    def draw(self, draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return mutated(draw, self._seeds)
        header, claims = draw.choice(self._headers), draw.choice(self._claims)
        changed = mutated(draw, self._claims if draw.random() < 0.6 else self._headers)
        if draw.random() < 0.05:
            changed = draw.choice((b"[", b'{"a":')) * draw.randrange(1_500)
        header, claims = draw.choice(((changed, claims), (header, changed)))
        return _signed(header, claims)

    def run(self, data: bytes) -> None:
        token = token_in([("authorization", f"Bearer {data.decode('latin-1')}")])
        first, second = self._verifiers
        _all_of(
            lambda: first.identify(token),
            lambda: second.identify(token),
            lambda: self._authorizer.authorize("shoal.v1.Jobs/List", token),
            lambda: self._copy.check(token, second, "s", 5),
            lambda: self._check(token),
        )

    def stop(self) -> None:
        """Nothing to free."""


class AccessFiles:
    """Access files and token files."""

    name = "access_file"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", "SHOAL_TOKEN_FILE")}
        os.environ["XDG_STATE_HOME"] = self._folder.name
        os.environ.pop("SHOAL_TOKEN_FILE", None)
        self._file = AccessFile(_ADDRESS)
        self._file.write({AccessRole.ADMIN: "a.b.c", AccessRole.WORKER: "d.e.f"})
        self._seeds = [self._file.path.read_bytes(), b"a.b.c\n"]

    def draw(self, draw: random.Random) -> bytes:
        if draw.random() < 0.02:
            return draw.choice((b"[", b'{"admin":')) * draw.randrange(7_000)
        return mutated(draw, self._seeds)

    def run(self, data: bytes) -> None:
        path = self._file.path
        path.write_bytes(data)
        source = TokenSource(_ADDRESS, AccessRole.ADMIN)
        os.environ["SHOAL_TOKEN_FILE"] = str(path)
        named = TokenSource(_ADDRESS, AccessRole.ADMIN)
        del os.environ["SHOAL_TOKEN_FILE"]
        _all_of(self._file.read, source, named, lambda: self._file.remove({AccessRole.ADMIN: "x"}))

    def stop(self) -> None:
        for name, value in self._before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        self._folder.cleanup()


def _certificate(subject: x509.Name, *extensions: x509.ExtensionType) -> x509.Certificate:
    when = datetime.datetime.fromtimestamp(_NOW, datetime.UTC)
    builder = (
        x509.CertificateBuilder(subject, subject, _KEY.public_key(), 31)
        .not_valid_before(when)
        .not_valid_after(when + datetime.timedelta(days=9))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(_KEY, None)


def _wrapped(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


class Certificates:
    """Certificates of callers and of CAs: changed DER, changed PEM, and well-formed ones with changed names."""

    name = "certificate"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._file = Path(self._folder.name) / "ca.pem"
        uris = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role.value}") for role in AccessRole]
        others = [x509.DNSName("server.role.shoal.internal"), x509.RFC822Name("a@b.c"), uris[0]]
        self._names = [x509.SubjectAlternativeName(names) for names in ([uris[0]], uris[:2], others, uris[3:4])]
        self._encoded = [names.public_bytes() for names in self._names]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ann")])
        found = [_certificate(subject), *(_certificate(subject, names) for names in self._names)]
        self._ders = [each.public_bytes(Encoding.DER) for each in found]
        self._pems = [each.public_bytes(Encoding.PEM) for each in found]
        self._subject = subject

    def draw(self, draw: random.Random) -> bytes:
        kind = draw.random()
        if kind < 0.2:
            return mutated(draw, self._pems)
        if kind < 0.6:
            return _wrapped(mutated(draw, self._ders))
        # The holder of a CA's key, or a careless operator, can name anything.
        oid = x509.SubjectAlternativeName.oid
        names = x509.UnrecognizedExtension(oid, mutated(draw, self._encoded))
        return _certificate(self._subject, names).public_bytes(Encoding.PEM)

    def run(self, data: bytes) -> None:
        self._file.write_bytes(data)
        authorizer = Authorizer(_VERIFIER)
        _all_of(
            lambda: principal_in(data),
            lambda: authorizer.authorize("shoal.v1.Jobs/List", "", lambda: data),
            lambda: TlsFiles(self._file),
        )

    def stop(self) -> None:
        self._folder.cleanup()


_VERIFIER = TokenVerifier(_KEY.public_key().public_bytes_raw(), lambda: _NOW)


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [Tokens(), AccessFiles(), Certificates()]

"""Identity by certificate: the principal that a caller's certificate names, for a caller without a token."""

import functools

from cryptography import x509
from cryptography.x509.oid import NameOID

from shoal import errors
from shoal._security.principal import GIVEN_ROLES, HOLDER_RULE, ID_PREFIX, AccessRole, Principal, can_hold
from shoal._security.role_names import is_role_name

# The URI in a certificate that names the role of its holder, as `shoal certs init` and the manifests write it.
ROLE_URI = "spiffe://shoal/"
# What `cryptography` raises for parts of a certificate that it cannot read. It decodes some parts only when asked.
DAMAGED = (ValueError, TypeError, x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
# A caller presents the same certificate for months, and its calls ask for it each time.
_REMEMBERED = 1_024


@functools.lru_cache(_REMEMBERED)
def principal_in(pem: bytes) -> Principal:
    """Returns whom a certificate identifies. The caller of this function has checked that a trusted CA issued it.

    Args:
        pem: the certificate.

    Returns:
        The identity: the role of the URI, the common name, `cert:SERIAL` in hexadecimal as the id, and the time when
        the certificate expires.

    Raises:
        Unauthenticated: it cannot be read, it does not name exactly one role, a certificate cannot give this role, or
            its common name cannot be the name of a holder.
    """
    try:
        return _principal_in(x509.load_pem_x509_certificate(pem))
    except DAMAGED as error:
        raise errors.Unauthenticated(
            f"the caller's certificate cannot be read: {error}. Use a certificate of `shoal certs init`, or a token"
        ) from None


def _principal_in(certificate: x509.Certificate) -> Principal:
    roles = {
        uri.removeprefix(ROLE_URI)
        for uri in alternative_names(certificate, x509.UniformResourceIdentifier)
        if uri.startswith(ROLE_URI)
    }
    given = {role.value for role in GIVEN_ROLES}
    if len(roles) != 1 or not roles <= given:
        found = ", ".join(sorted(roles)) or "none"
        raise errors.Unauthenticated(
            f"the call has no token, and its certificate must name one role ({', '.join(sorted(given))}) as a URI such "
            f"as {ROLE_URI}worker; it names: {found}. Use a certificate of `shoal certs init`, or a token"
        )
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(names[0].value) if len(names) == 1 else ""
    if not can_hold(name):
        raise errors.Unauthenticated(
            f"the call has no token, and its certificate must have one common name, which names its holder; it has: "
            f"{', '.join(repr(each.value) for each in names)[:200] or 'none'}. A name has {HOLDER_RULE}. Use a "
            "certificate of `shoal certs issue`, or a token"
        )
    return Principal(
        name,
        AccessRole(*roles),
        f"{ID_PREFIX}{certificate.serial_number:x}",
        expires_at=certificate.not_valid_after_utc.timestamp(),
    )


def certificate_id(pem: bytes) -> str:
    """Returns the id by which a certificate is revoked: `cert:SERIAL`, in hexadecimal.

    Args:
        pem: the certificate. Further certificates may follow it, as in a chain.

    Raises:
        BadRequest: it cannot be read, or is that of a CA, whose revocation would refuse nobody.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        is_ca = any(it.value.ca for it in certificate.extensions if isinstance(it.value, x509.BasicConstraints))
    except DAMAGED as error:
        raise errors.BadRequest(f"it is no certificate in PEM format: {error}") from None
    if is_ca:
        raise errors.BadRequest(
            "it is the certificate of a CA, and its revocation would not revoke those that the CA has issued; revoke "
            "each of them, or make a new CA (`shoal certs init`)"
        )
    return f"{ID_PREFIX}{certificate.serial_number:x}"


def roles_shown(pem: bytes) -> list[str]:
    """Returns the names of roles in a certificate, by which TLS clients know a coordinator or a server."""
    return [name for name in alternative_names(x509.load_pem_x509_certificate(pem), x509.DNSName) if is_role_name(name)]


def alternative_names(
    certificate: x509.Certificate, kind: type[x509.DNSName] | type[x509.UniformResourceIdentifier]
) -> list[str]:
    """Returns the alternative names of this kind in a certificate; none if it has none.

    Raises:
        Exception: one of `DAMAGED`, because the certificate cannot be read. `cryptography` decodes extensions late.
    """
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return alternatives.value.get_values_for_type(kind)


__all__ = ["DAMAGED", "ROLE_URI", "alternative_names", "certificate_id", "principal_in", "roles_shown"]

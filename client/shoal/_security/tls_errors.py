"""Texts for failed TLS handshakes: the reason, and what to do."""

import ssl

# OpenSSL's reasons for a handshake with an end that does not use TLS.
NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNSUPPORTED_PROTOCOL", "BAD_PACKET_LENGTH"}
# The meaning of an alert from the other end, by a word in OpenSSL's reason.
_ALERTS = {
    "UNKNOWN_CA": "it does not trust the CA of this end's certificate; use certificates of one CA",
    "CERTIFICATE_EXPIRED": "this end's certificate has expired by the other end's clock; replace it, or set the clocks",
    "CERTIFICATE_REQUIRED": "it requires a certificate; give --tls-cert and --tls-key",
    "HANDSHAKE_FAILURE": "it requires a certificate of this end; give --tls-cert and --tls-key",
    "ACCESS_DENIED": "this end's certificate does not name the role that it requires; give this process the files of "
    "that role from `shoal certs init` (ranks of a group: server.pem and server-key.pem)",
    "BAD_CERTIFICATE": "it does not accept this end's certificate; check its dates and its CA",
    "EOF": "it closed the connection in the TLS handshake; if it requires a certificate, "
    "give --tls-cert and --tls-key; otherwise check that it uses TLS",
}


def explained(error: ssl.SSLError) -> str:
    """Returns why a TLS handshake failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other end is refused: {error.verify_message.rstrip('.')}; {_advice(error)}"
    reason = "EOF" if isinstance(error, ssl.SSLEOFError) else error.reason or str(error)
    if reason in NO_TLS:
        return "the other end does not use TLS; give both ends TLS files (--tls-ca, --tls-cert, --tls-key), or neither"
    if "ALERT" in reason or "EOF" in reason:
        known = next((text for words, text in _ALERTS.items() if words in reason), reason.lower().replace("_", " "))
        return f"the other end refuses this connection: {known}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the other end shows no certificate; give it --tls-cert and --tls-key"
    return f"the TLS handshake failed: {reason.lower().replace('_', ' ')}"


def _advice(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:  # of X509_V_ERR_... in OpenSSL
        case 9 | 10:  # not yet valid; expired
            return "give the other end a new certificate, or set the clocks of both machines"
        case 26:  # purpose
            return "a server needs the certificate of coordinator, server or worker"
        case 62:  # DNS name
            return (
                "the other end has another role, or its certificate does not name its role: check the address, then "
                "give it the files of its role from `shoal certs init`, or add this DNS name to its certificate "
                "(`dnsNames` of cert-manager)"
            )
        case _:
            return "give both ends certificates of one CA, and this CA with --tls-ca"


__all__ = ["NO_TLS", "explained"]

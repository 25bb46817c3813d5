"""The texts for failed TLS handshakes."""

import ssl

from shoal._security import explained


def test_a_connection_that_is_closed_in_the_handshake_says_what_to_do_about_a_certificate() -> None:
    assert "if it requires a certificate, give --tls-cert and --tls-key" in explained(ssl.SSLEOFError())

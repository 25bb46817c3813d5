"""The metric `shoal_coordinator_wanted_workers`, read over TLS from a coordinator on any host."""

import http.client
import ssl

from shoal import errors

_METRIC = b"shoal_coordinator_wanted_workers "
# A name in the certificate of each coordinator. That of its host may be missing: an engine may move the coordinator to
# a node that joined after the certificate was issued. The CA is the cluster's own.
_NAME = "localhost"


def read_wanted_workers(address: str, ca: str, certificate: str, key: str, *, timeout_s: float) -> int:
    """Returns the number of workers that the jobs could use now. It uses no proxy.

    Args:
        address: host:port of the coordinator's metrics.
        ca: PEM file of the cluster's CA.
        certificate: PEM file of a certificate of this CA.
        key: PEM file of its key.
        timeout_s: seconds for each step of the connection.

    Raises:
        Unreachable: the metrics cannot be read.
    """
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(certificate, key)
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.connect()
        connection.sock = context.wrap_socket(connection.sock, server_hostname=_NAME)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().splitlines()
        return int(float(next(line for line in lines if line.startswith(_METRIC)).removeprefix(_METRIC)))
    except (OSError, http.client.HTTPException, StopIteration, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise errors.Unreachable(f"cannot read https://{address}/metrics: {reason}") from None
    finally:
        connection.close()


__all__ = ["read_wanted_workers"]

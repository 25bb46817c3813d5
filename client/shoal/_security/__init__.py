"""Protection of a cluster's connections: certificates, TLS settings, and what a process presents to others.

`_rpc`, `_transport`, `_role`, `_cli`, `client` and the roles import it. It imports nothing of Shoal except `errors` and
`_system`, and no grpc. `certificates` and `tls` are imported late or by their own names: `cryptography` is slow to
import, and a process without TLS does not need it.
"""

from shoal._security.credentials import NO_CREDENTIALS, VARIABLES, Credentials
from shoal._security.tls_errors import NO_TLS, explained

__all__ = ["NO_CREDENTIALS", "NO_TLS", "VARIABLES", "Credentials", "explained"]

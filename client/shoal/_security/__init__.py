"""Who may do what in a cluster, and how its connections are protected.

Tokens and tickets identify callers, `permissions` says what each of them may call, and access files are where processes
find their tokens. `certificates` and `tls` protect connections. `credentials` is what a process presents to others.

`_rpc`, `_transport`, `_role`, `_cli`, `client` and the roles import it. It imports nothing of Shoal except `errors` and
`_system`, and no grpc. `certificates`, `tls` and `tokens` are imported late or by their own names: `cryptography` is
slow to import, and a client without TLS does not need it.
"""

from shoal._security.access_files import AccessFile, TokenSource
from shoal._security.authorizer import Authorizer, open_authorizer
from shoal._security.bearer import MAX_TOKEN_BYTES, authorization, token_in
from shoal._security.credentials import NO_CREDENTIALS, VARIABLES, Credentials
from shoal._security.permissions import OPEN_CALLS, PERMISSIONS, check_own, check_permitted
from shoal._security.principal import GIVEN_ROLES, AccessRole, Principal
from shoal._security.tls_errors import NO_TLS, explained

__all__ = [
    "GIVEN_ROLES",
    "MAX_TOKEN_BYTES",
    "NO_CREDENTIALS",
    "NO_TLS",
    "OPEN_CALLS",
    "PERMISSIONS",
    "VARIABLES",
    "AccessFile",
    "AccessRole",
    "Authorizer",
    "Credentials",
    "Principal",
    "TokenSource",
    "authorization",
    "check_own",
    "check_permitted",
    "explained",
    "open_authorizer",
    "token_in",
]

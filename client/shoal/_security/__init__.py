"""Identities: tokens and tickets, what each caller may do, and the private files in which processes find their tokens.

`_rpc` authorizes calls with this package. It imports nothing of Shoal except `errors` and `_system`, and no grpc. The
coordinator and the servers import `tokens` by its own name: its cryptography takes a while to import.
"""

from shoal._security.access_files import AccessFile, TokenSource, find_token, read_token_file
from shoal._security.authorizer import Authorizer, open_authorizer
from shoal._security.bearer import MAX_TOKEN_BYTES, authorization, token_in
from shoal._security.permissions import OPEN_CALLS, PERMISSIONS, check_own, check_permitted
from shoal._security.principal import GIVEN_ROLES, AccessRole, Principal

__all__ = [
    "GIVEN_ROLES",
    "MAX_TOKEN_BYTES",
    "OPEN_CALLS",
    "PERMISSIONS",
    "AccessFile",
    "AccessRole",
    "Authorizer",
    "Principal",
    "TokenSource",
    "authorization",
    "check_own",
    "check_permitted",
    "find_token",
    "open_authorizer",
    "read_token_file",
    "token_in",
]

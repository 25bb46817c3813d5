"""Access control of a cluster, and protection of its connections.

Tokens and tickets identify callers. `permissions` says which calls each of them may make, and `audited_calls` says
which calls audit logs record. Processes find their tokens in access files, and `port_check` keeps tokens from other
users and from networks without TLS. `certificates` and `tls` protect connections. `credentials` has what a process
presents to others. `grants` lets a server make a backup on another server.

`_rpc`, `_transport`, `_role`, `_cli`, `client` and the roles import it. It imports nothing of Shoal except `errors` and
`_system`, and no grpc. This module does not import `certificates`, `tls` and `tokens`: code that needs them imports
them directly. They import `cryptography`, which is slow to import, and which a client without TLS does not need.
"""

from shoal._security.access_files import AccessFile, TokenSource
from shoal._security.audited_calls import AUDITED, REFUSALS, Audited
from shoal._security.authorizer import Authorizer, open_authorizer
from shoal._security.bearer import MAX_TOKEN_BYTES, RENEWED_AFTER, authorization, token_in
from shoal._security.credentials import NO_CREDENTIALS, VARIABLES, Credentials
from shoal._security.grants import CopyGrant
from shoal._security.member_secrets import MemberIdentity, MemberSecrets, shown, shown_in
from shoal._security.permissions import (
    MEMBER_ROLES,
    OPEN_CALLS,
    PAGE_ROLES,
    PERMISSIONS,
    check_own,
    check_permitted,
)
from shoal._security.port_check import CHECK_EVERY_S, INSECURE_VARIABLE, PortCheck, user_mark
from shoal._security.principal import GIVEN_ROLES, HOLDER_RULE, ID_PREFIX, LOCAL_HOLDER, AccessRole, Principal, can_hold
from shoal._security.role_names import NAMED_ROLES, role_name
from shoal._security.tls_errors import NO_TLS, explained

__all__ = [
    "AUDITED",
    "CHECK_EVERY_S",
    "GIVEN_ROLES",
    "HOLDER_RULE",
    "ID_PREFIX",
    "INSECURE_VARIABLE",
    "LOCAL_HOLDER",
    "MAX_TOKEN_BYTES",
    "MEMBER_ROLES",
    "NAMED_ROLES",
    "NO_CREDENTIALS",
    "NO_TLS",
    "OPEN_CALLS",
    "PAGE_ROLES",
    "PERMISSIONS",
    "REFUSALS",
    "RENEWED_AFTER",
    "VARIABLES",
    "AccessFile",
    "AccessRole",
    "Audited",
    "Authorizer",
    "CopyGrant",
    "Credentials",
    "MemberIdentity",
    "MemberSecrets",
    "PortCheck",
    "Principal",
    "TokenSource",
    "authorization",
    "can_hold",
    "check_own",
    "check_permitted",
    "explained",
    "open_authorizer",
    "role_name",
    "shown",
    "shown_in",
    "token_in",
    "user_mark",
]

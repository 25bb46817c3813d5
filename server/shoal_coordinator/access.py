"""Access to the cluster: the key that signs tokens, the tokens that admins made, and tickets for participants."""

import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
from google.protobuf.message import DecodeError

from shoal import errors
from shoal._limits import catalogue
from shoal._security import (
    GIVEN_ROLES,
    HOLDER_RULE,
    ID_PREFIX,
    LOCAL_HOLDER,
    AccessRole,
    MemberSecrets,
    Principal,
    can_hold,
)
from shoal._security.tokens import TokenSigner
from shoal.v1 import state_pb2
from shoal_coordinator.certificate_holders import HolderVerifier
from shoal_coordinator.messages import record_keys
from shoal_coordinator.server_tokens import ServerTokens

_log = structlog.get_logger(__name__)

# Seconds for which a ticket is valid. Its holder gets another one after a part of this time (`RENEWED_AFTER`).
TICKET_S = 600.0
# Seconds for which the tokens in the access file are valid. The coordinator writes the access file when it starts.
LOCAL_S = 365 * 86_400.0
MAX_VALID_S = 10 * 365 * 86_400.0
MAX_TOKENS, MAX_REVOCATIONS = catalogue.MAX_TOKENS.default, catalogue.MAX_REVOCATIONS.default
# The name in the record of a revoked certificate that has not called since the coordinator's start.
UNKNOWN_HOLDER = "certificate"
# Ids of what can be revoked though no admin made it: a certificate, and a token of the access file.
_UNLISTED = re.compile(rf"{ID_PREFIX}[0-9A-Fa-f]{{1,64}}|{LOCAL_HOLDER}-[0-9a-f]{{8}}")
# Roles of the tokens for processes of the coordinator's user on its machine.
_LOCAL_ROLES = (AccessRole.ADMIN, AccessRole.WORKER, AccessRole.SERVER)

Write = Callable[[Mapping[str, bytes | None]], None]


class Revocations(NamedTuple):
    """The revoked tokens of a cluster.

    Attributes:
        revision: a number that changes when the tokens change, and is the same after a restart. 0 if there are none.
        tokens: their ids, in order.
    """

    revision: int
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, tokens: frozenset[str]) -> "Revocations":
        """Returns the revocations of these tokens."""
        found = tuple(sorted(tokens))
        digest = hashlib.sha256("\n".join(found).encode()).digest()
        return cls(max(1, int.from_bytes(digest[:8])) if found else 0, found)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """The description of a token that an admin made, or of a revoked certificate.

    Attributes:
        id: a random id, or `cert:SERIAL` of a certificate.
        name: name of the holder; `UNKNOWN_HOLDER` for a revoked certificate whose holder is not known.
        role: what its holder may do; any role if the holder is not known.
        expires_at: Unix time in seconds; for a revoked certificate, when the revocation is forgotten: when the
            certificate expires, or ten years after the revocation if the certificate has not called.
        revoked: whether it was revoked.
    """

    id: str
    name: str
    role: AccessRole
    expires_at: float
    revoked: bool = False


class Access:
    """The tokens of one cluster. Thread-safe.

    Args:
        records: the stored records of access, by key; none for a new cluster.
        write: makes changes of records durable before it returns.
        clock: returns Unix time in seconds.

    Raises:
        StoreUnreadable: a record is not valid.

    Attributes:
        signer: makes tokens.
        verifier: checks the tokens of calls.
        public_key: the key with which servers check tickets.
        servers: the tokens that the coordinator presents to servers.
        members: the secrets of members.
        revocations: the revoked tokens that have not expired.
    """

    def __init__(self, records: Mapping[str, bytes], write: Write, clock: Callable[[], float]) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()  # guards what follows; held while a change is written, so that they keep order
        self._tokens = _tokens_in(records)
        self._local_ids: list[str] = []  # of the tokens in the access file
        key = records.get(record_keys.ACCESS_KEY) or TokenSigner.new_key()
        self._key_is_new = record_keys.ACCESS_KEY not in records
        self._key = key
        self.signer = TokenSigner(key, clock)
        self.public_key = self.signer.public_key
        self.verifier = HolderVerifier(self.public_key, clock)
        self.servers = ServerTokens(self.signer, clock)
        self.members = MemberSecrets(key)
        self.revocations = Revocations.of(frozenset())
        self._apply_revocations()

    def start(self) -> None:
        """Makes a new cluster's key durable. Call it when records can be written, before the first call."""
        if self._key_is_new:
            self._write({record_keys.ACCESS_KEY: self._key})

    @property
    def revoked(self) -> frozenset[str]:
        """The ids of the revoked tokens that have not expired."""
        return self.verifier.revoked

    @property
    def local_revoked(self) -> bool:
        """Whether a token that is in the access file was revoked."""
        with self._lock:
            return not self.revoked.isdisjoint(self._local_ids)

    def has_ended(self, principal: Principal | None) -> bool:
        """Returns whether the token or the certificate of a caller was revoked or has expired."""
        return principal is not None and (principal.token in self.revoked or principal.expires_at <= self._clock())

    def local_tokens(self) -> dict[AccessRole, str]:
        """Returns new tokens for the processes of this user on this machine.

        Their ids are those of the earlier start until they are revoked, so a revocation also ends the tokens in earlier
        access files, and a restart ends no tickets.
        """
        now = self._clock()
        with self._lock:
            kept = {token.role: token.id for token in self._tokens.values() if _is_local(token) and not token.revoked}
            made = [
                TokenInfo(kept.get(role) or _new_local_id(), LOCAL_HOLDER, role, now + LOCAL_S) for role in _LOCAL_ROLES
            ]
            self._write({record_keys.of_token(token.id): _record(token) for token in made})
            self._tokens |= {token.id: token for token in made}
            self._local_ids = [token.id for token in made]
        return {
            token.role: self.signer.sign(Principal(token.name, token.role, token.id), valid_s=LOCAL_S) for token in made
        }

    def ticket(self, caller: Principal, role: AccessRole, job: str, member: str, incarnation: int) -> tuple[str, float]:
        """Returns a ticket, and the seconds for which it is valid.

        Args:
            caller: who requests it. If the caller's token or certificate is revoked or expires, its tickets are refused
                too.
            role: access role of the ticket.
            job: the job.
            member: the participant, or the server; empty for a reader.
            incarnation: the member's incarnation.
        """
        holder = Principal(member or caller.name, role, caller.token, job, incarnation, caller.expires_at)
        valid_s = max(0.0, min(TICKET_S, caller.expires_at - self._clock()))
        return self.signer.sign(holder, valid_s=TICKET_S), valid_s

    def create(self, name: str, role: str, valid_s: float) -> tuple[TokenInfo, str]:
        """Makes a token.

        Args:
            name: name of the holder.
            role: admin, submitter, reader, worker or server.
            valid_s: seconds until it expires.

        Returns:
            The description of the token, and the token itself.

        Raises:
            BadRequest: the name, the role or the time is not valid.
            LimitExceeded: there are too many tokens.
        """
        if not can_hold(name):
            raise errors.BadRequest(
                f"{name!r:.80} cannot be the name of a token's holder; give a name that has {HOLDER_RULE}",
                name=name[:80],
            )
        if role not in GIVEN_ROLES:
            raise errors.BadRequest(
                f"{role!r} is not a role of a token; use one of: {', '.join(role.value for role in GIVEN_ROLES)}"
            )
        if not 0 < valid_s <= MAX_VALID_S:
            raise errors.BadRequest(f"a token cannot be valid for {valid_s:g} s; give 1 to {MAX_VALID_S:.0f} seconds")
        with self._lock:
            if sum(not _is_unlisted(token) for token in self._listed()) >= MAX_TOKENS:
                raise catalogue.MAX_TOKENS.refusal(
                    f"the cluster has {MAX_TOKENS} tokens that have not expired, with the revoked ones",
                    "give tokens that expire sooner, or use one token for several processes",
                )
            made = TokenInfo(secrets.token_hex(8), name, AccessRole(role), self._clock() + valid_s)
            self._store([made])
        return made, self.signer.sign(Principal(name, made.role, made.id), valid_s=valid_s)

    def revoke(self, token: str) -> list[TokenInfo]:
        """Revokes the token with this id, or all tokens of this name. Returns the tokens that this call revoked.

        The id `cert:SERIAL` revokes the certificate with this serial number, in hexadecimal. The name `local` revokes
        the tokens of the access file, also those of earlier starts.

        Raises:
            BadRequest: there is no such token, or the text after `cert:` is not a serial number.
            LimitExceeded: too many certificates and tokens of access files are revoked.
        """
        with self._lock:
            found = [each for each in self._tokens.values() if token == each.id or _is_named(each, token)]
            if not found and _UNLISTED.fullmatch(token):
                made = self._unlisted(token)
                found = [self._tokens.get(made.id, made)]
            if not found and token.startswith(ID_PREFIX):
                raise errors.BadRequest(
                    f"{token.removeprefix(ID_PREFIX)!r:.80} is not a serial number in hexadecimal; "
                    "`openssl x509 -noout -serial -in FILE` prints that of a certificate"
                )
            if not found:
                raise errors.BadRequest(
                    f"there is no token with the id or the name {token!r}; `shoal token ls` lists them"
                )
            revoked = [replace(each, revoked=True) for each in found if not each.revoked]
            unlisted = sum(map(_is_unlisted, self._listed())) + sum(map(_is_unlisted, revoked))
            if unlisted > MAX_REVOCATIONS and any(map(_is_unlisted, revoked)):
                raise catalogue.MAX_REVOCATIONS.refusal(
                    f"the cluster has {MAX_REVOCATIONS} revoked certificates and tokens of access files",
                    "make a new CA (`shoal certs init`) and new certificates, so that the earlier ones cannot be used",
                )
            self._store(revoked)
        return revoked

    def tokens(self) -> list[TokenInfo]:
        """Returns the tokens that have not expired, in the order in which they were made.

        The tokens of the access file are among them only when they are revoked.
        """
        with self._lock:
            return self._listed()

    def check_valid(self, principal: Principal) -> None:
        """Checks that the token or the certificate which identified a caller earlier is still valid.

        Raises:
            Unauthenticated: it was revoked, or has expired.
        """
        if self.has_ended(principal):
            raise errors.Unauthenticated(
                f"the {principal.proof} of {principal} was revoked or has expired; log in with another one"
            )

    def _store(self, changed: Sequence[TokenInfo]) -> None:
        """Stores new or changed tokens, and what certificates have shown since, and forgets those that have expired."""
        now = self._clock()
        changed = [*map(self._with_holder, self._tokens.values()), *changed]
        changed = [token for token in changed if token != self._tokens.get(token.id)]
        expired = [token.id for token in self._tokens.values() if token.expires_at <= now]
        changes: dict[str, bytes | None] = dict.fromkeys(map(record_keys.of_token, expired))
        self._write(changes | {record_keys.of_token(token.id): _record(token) for token in changed})
        for token in expired:
            del self._tokens[token]
        self._tokens |= {token.id: token for token in changed}
        self._apply_revocations()

    def _listed(self) -> list[TokenInfo]:
        now = self._clock()
        return [
            token
            for token in self._tokens.values()
            if token.expires_at > now and (token.revoked or not _is_local(token))
        ]

    def _unlisted(self, token: str) -> TokenInfo:
        """Returns what is recorded of a certificate, or of a token of the access file, that is to be revoked."""
        now = self._clock()
        if not (serial := token.partition(ID_PREFIX)[2]):
            return TokenInfo(token, LOCAL_HOLDER, AccessRole.ADMIN, now + LOCAL_S)
        certificate = f"{ID_PREFIX}{int(serial, 16):x}"  # other tools pad it with zeros
        return self._with_holder(TokenInfo(certificate, UNKNOWN_HOLDER, AccessRole.READER, now + MAX_VALID_S))

    def _with_holder(self, token: TokenInfo) -> TokenInfo:
        """Returns what is recorded of a token, with the holder and the expiry of a certificate that has called."""
        holder = self.verifier.holder(token.id) if token.id.startswith(ID_PREFIX) else None
        if holder is None:
            return token
        expires_at = min(token.expires_at, holder.expires_at)
        return replace(token, name=holder.name, role=holder.role, expires_at=expires_at)

    def _apply_revocations(self) -> None:
        now = self._clock()
        revoked = (token.id for token in self._tokens.values() if token.revoked and token.expires_at > now)
        self.revocations = Revocations.of(frozenset(revoked))
        self.verifier.revoke(frozenset(self.revocations.tokens))


def revocations_of(access: Access | None) -> Revocations:
    """Returns the revoked tokens of a cluster; none if the cluster asks for no tokens."""
    return access.revocations if access else Revocations.of(frozenset())


def _new_local_id() -> str:
    return f"{LOCAL_HOLDER}-{secrets.token_hex(4)}"


def _is_local(token: TokenInfo) -> bool:
    """Returns whether a token is one of the access file."""
    return token.id.startswith(f"{LOCAL_HOLDER}-")


def _is_unlisted(token: TokenInfo) -> bool:
    """Returns whether no admin made a token: it is a certificate, or one of the access file."""
    return bool(_UNLISTED.fullmatch(token.id))


def _is_named(token: TokenInfo, name: str) -> bool:
    """Returns whether a token, not a revoked certificate, has this name."""
    return token.name == name and not token.id.startswith(ID_PREFIX)


def _tokens_in(records: Mapping[str, bytes]) -> dict[str, TokenInfo]:
    tokens = {}
    for key, record in records.items():
        if key == record_keys.ACCESS_KEY:
            continue
        token = key.rpartition("/")[2]
        try:
            found = state_pb2.TokenRecord.FromString(record)
            tokens[token] = TokenInfo(token, found.name, AccessRole(found.role), found.expires_at, found.revoked)
        except (DecodeError, ValueError) as error:
            raise errors.StoreUnreadable(f"the record {key} is damaged: {error}") from None
    return tokens


def _record(token: TokenInfo) -> bytes:
    return state_pb2.TokenRecord(
        name=token.name, role=token.role.value, expires_at=token.expires_at, revoked=token.revoked
    ).SerializeToString(deterministic=True)


__all__ = [
    "LOCAL_S",
    "MAX_REVOCATIONS",
    "MAX_TOKENS",
    "MAX_VALID_S",
    "TICKET_S",
    "UNKNOWN_HOLDER",
    "Access",
    "Revocations",
    "TokenInfo",
    "revocations_of",
]

"""Secrets of members: what tells apart the processes whose tokens or certificates have the same name.

The coordinator gives each registration a secret, and each later call for the member shows it. A secret is a MAC of the
member's id and incarnation, so the coordinator stores none, and secrets stay valid when it restarts.
"""

import hashlib
import hmac
from functools import lru_cache
from typing import NamedTuple

from shoal import errors
from shoal._security.bearer import value_in

_KEY = "shoal-member"
_PURPOSE = b"shoal member secret"
# Longer than each secret, so that the MACs that are kept have a bound.
_MAX_CHARACTERS = 160
# A Report shows a secret, so the MACs of this number of members are kept.
_KEPT = 16_384


class MemberIdentity(NamedTuple):
    """The registration whose secret a caller has shown."""

    member: str
    incarnation: int


def shown(secret: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call for a member, or none for an empty secret."""
    return ((_KEY, secret),) if secret else ()


def shown_in(metadata: object) -> str:
    """Returns the secret in the metadata of a call, or an empty string."""
    return value_in(metadata, _KEY)


class MemberSecrets:
    """The secrets of one cluster's members. Immutable.

    Args:
        key: the secret key of the cluster. The key of the secrets is derived from it.
    """

    def __init__(self, key: bytes) -> None:
        derived = hmac.digest(key, _PURPOSE, hashlib.sha256)

        @lru_cache(_KEPT)
        def mac(named: str) -> bytes:
            return hmac.digest(derived, named.encode(), hashlib.sha256).hex().encode()

        self._mac = mac

    def of(self, member: str, incarnation: int) -> str:
        """Returns the secret of a registration: MEMBER.INCARNATION.MAC."""
        named = f"{member}.{incarnation}"
        return f"{named}.{self._mac(named).decode()}"

    def identify(self, secret: str) -> MemberIdentity:
        """Returns the registration that a secret belongs to.

        Raises:
            SecretRefused: the secret is not genuine, for example because the coordinator has a new store.
        """
        named, _, mac = secret.rpartition(".")
        if len(secret) > _MAX_CHARACTERS or not hmac.compare_digest(self._mac(named), mac.encode()):
            raise errors.SecretRefused("the secret of the member is not one of this coordinator; register again")
        member, _, incarnation = named.rpartition(".")
        return MemberIdentity(member, int(incarnation))


__all__ = ["MemberIdentity", "MemberSecrets", "shown", "shown_in"]

"""Grants: what the coordinator signs, so that the primary of a lock group may make a backup on another server.

A grant is a JSON Web Token with the coordinator's signature, as tokens are. It identifies no caller, so no call accepts
it as a token. docs/decisions/0086 explains what it protects.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shoal import errors

if TYPE_CHECKING:
    from shoal._security.tokens import TokenSigner, TokenVerifier

# Seconds for which a grant is valid. The primary uses it at once. If the clock of the backup's server is ahead of the
# coordinator's, the rest of this time is left.
GRANT_S = 600.0


@dataclass(frozen=True, slots=True)
class CopyGrant:
    """The copy of a lock group that the coordinator wants.

    Attributes:
        job: name of the job.
        generation: generation of its placement.
        group: number of the lock group.
        term: number of the coordinator's decision about the copies of the group.
        server: member id of the primary's server.
        incarnation: incarnation of the primary's server.
    """

    job: str
    generation: int
    group: int
    term: int
    server: str
    incarnation: int

    def signed(self, signer: "TokenSigner", backup: str, incarnation: int) -> str:
        """Returns the grant for this copy.

        Args:
            signer: signs it.
            backup: member id of the server that gets the copy. Only this server accepts the grant.
            incarnation: incarnation of that server.
        """
        return signer.sign_claims(asdict(self), audience=_audience(backup, incarnation), valid_s=GRANT_S)

    def check(self, grant: str, verifier: "TokenVerifier", backup: str, incarnation: int) -> None:
        """Checks that the coordinator has granted this copy.

        Args:
            grant: the grant that came with the request for the copy.
            verifier: has the coordinator's public key.
            backup: member id of the server that checks.
            incarnation: its incarnation.

        Raises:
            Forbidden: there is no grant, the coordinator did not sign it, it has expired, or it is for another copy or
                another server.
        """
        if not grant:
            raise self._refusal(backup, "it has no grant of the coordinator", _SAME_VERSION)
        try:
            claims = verifier.claims(grant, ["aud", "exp", *asdict(self)])
            late_s = verifier.now - float(claims["exp"])
        except (errors.Unauthenticated, ValueError, TypeError, OverflowError):
            raise self._refusal(backup, "this cluster's coordinator did not sign its grant", _REVOKE) from None
        if claims["aud"] != _audience(backup, incarnation):
            why = f"its grant is for {str(claims['aud'])!r:.300} and this is {_audience(backup, incarnation)!r}"
            raise self._refusal(backup, why, _REVOKE)
        for name, wanted in asdict(self).items():
            if claims[name] != wanted:
                why = f"its grant is for {name} {claims[name]!r:.300} and not for {wanted!r}"
                raise self._refusal(backup, why, _REVOKE)
        if late_s >= 0:
            raise self._refusal(backup, f"its grant expired {late_s:.0f} s ago by the clock of {backup}", _CLOCKS)

    def _refusal(self, backup: str, why: str, advice: str) -> errors.Forbidden:
        return errors.Forbidden(
            f"server {backup!r} refuses the copy of lock group {self.group} of job {self.job} from server "
            f"{self.server!r}: {why}. {advice}",
            job=self.job,
        )


_SAME_VERSION = (
    "Start the coordinator and all servers in the same version of Shoal, and with or without --insecure alike"
)
_REVOKE = (
    "The coordinator tries again with a new grant. If this happens again, check that server: only the coordinator "
    "decides about copies. `shoal token revoke` takes its access away"
)
_CLOCKS = "The coordinator tries again with a new grant. Set the clocks of the coordinator and of the servers"


def _audience(backup: str, incarnation: int) -> str:
    return f"backup:{backup}:{incarnation}"


__all__ = ["GRANT_S", "CopyGrant"]

"""Grants: which copies a server accepts from another one."""

from dataclasses import replace
from typing import Any

import pytest

from shoal import errors
from shoal._security import AccessRole, Authorizer, CopyGrant, Principal, open_authorizer
from shoal._security.grants import GRANT_S
from shoal._security.tokens import TokenSigner, TokenVerifier, server_audience

COPY = CopyGrant("job", generation=2, group=5, term=3, server="p", incarnation=7)
BACKUP, LIFE = "b", 11


class Clock:
    def __init__(self) -> None:
        self.now = 1.8e9

    def __call__(self) -> float:
        return self.now


class Cluster:
    """A coordinator and the server of a backup, each with a clock of its own."""

    def __init__(self) -> None:
        self.coordinator, self.server = Clock(), Clock()
        self.signer = TokenSigner(TokenSigner.new_key(), self.coordinator)
        self.verifier = TokenVerifier(self.signer.public_key, self.server, server=BACKUP)

    def grant(self, copy: CopyGrant = COPY, backup: str = BACKUP, incarnation: int = LIFE) -> str:
        return copy.signed(self.signer, backup, incarnation)

    def check(self, grant: str, copy: CopyGrant = COPY) -> None:
        Authorizer(self.verifier, server=BACKUP).check_copy(copy, grant, LIFE)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_the_granted_copy_is_accepted(cluster: Cluster) -> None:
    cluster.check(cluster.grant())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"job": "x"}, "for job 'x' and not for 'job'"),
        ({"generation": 1}, "for generation 1 and not for 2"),
        ({"group": 0}, "for group 0 and not for 5"),
        ({"term": 2}, "for term 2 and not for 3"),
        ({"server": "q"}, "for server 'q' and not for 'p'"),
        ({"incarnation": 6}, "for incarnation 6 and not for 7"),
    ],
)
def test_a_grant_of_another_copy_is_refused(cluster: Cluster, other: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.Forbidden, match=says):
        cluster.check(cluster.grant(replace(COPY, **other)))


@pytest.mark.parametrize(("backup", "incarnation"), [("c", LIFE), (BACKUP, 10), (BACKUP, 0), ("b:1", 1)])
def test_only_the_named_life_of_a_server_accepts_a_grant(cluster: Cluster, backup: str, incarnation: int) -> None:
    with pytest.raises(errors.Forbidden, match=f"for 'backup:{backup}:{incarnation}' and this is 'backup:b:11'"):
        cluster.check(cluster.grant(backup=backup, incarnation=incarnation))


def test_a_missing_grant_is_refused(cluster: Cluster) -> None:
    with pytest.raises(
        errors.Forbidden, match=r"'b' refuses the copy of lock group 5 of job job from server 'p'.*no grant"
    ):
        cluster.check("")


def test_what_the_coordinator_did_not_sign_is_refused(cluster: Cluster) -> None:
    head, claims, signature = cluster.grant().split(".")
    forged = cluster.grant(replace(COPY, term=4)).split(".")[1]
    for other in (
        Cluster().grant(),
        f"{head}.{forged}.{signature}",
        f"eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.{claims}.",
        "x" * 100_000,
        "\udcff.x.y",
        "no grant",
    ):
        with pytest.raises(errors.Forbidden, match="did not sign"):
            cluster.check(other)


def test_no_token_is_a_grant_and_no_grant_is_a_token(cluster: Cluster) -> None:
    holder = Principal("coordinator", AccessRole.COORDINATOR)
    tokens = [
        cluster.signer.sign(holder, valid_s=60, audience=server_audience(BACKUP)),
        cluster.signer.sign(holder, valid_s=60, audience=f"backup:{BACKUP}:{LIFE}"),
        cluster.signer.sign(Principal("p", AccessRole.PEER, "t", "job", 7), valid_s=60),
    ]
    for token in tokens:
        with pytest.raises(errors.Forbidden, match="did not sign"):
            cluster.check(token)
    with pytest.raises(errors.Unauthenticated):
        cluster.verifier.identify(cluster.grant())


@pytest.mark.parametrize("offset_s", [-300, 300])
def test_clocks_may_differ_by_five_minutes(cluster: Cluster, offset_s: float) -> None:
    cluster.server.now += offset_s
    cluster.check(cluster.grant())


def test_a_grant_expires(cluster: Cluster) -> None:
    grant = cluster.grant()
    cluster.server.now += GRANT_S - 1
    cluster.check(grant)
    cluster.server.now += 5
    with pytest.raises(errors.Forbidden, match=r"expired 4 s ago by the clock of b.*Set the clocks"):
        cluster.check(grant)


def test_a_cluster_without_tokens_checks_no_grants() -> None:
    open_authorizer().check_copy(COPY, "", LIFE)


def test_a_server_without_a_key_accepts_none(cluster: Cluster) -> None:
    with pytest.raises(errors.Unreachable, match="not registered yet"):
        Authorizer(server=BACKUP).check_copy(COPY, cluster.grant(), LIFE)

"""The tokens of a cluster, by a fake clock: when what was made from a token ends, and what a restart keeps."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shoal import errors
from shoal._rpc import TicketSource
from shoal._security import AccessRole, Authorizer, Principal
from shoal._security.tokens import TokenVerifier
from shoal_coordinator.access import LOCAL_S, MAX_VALID_S, TICKET_S, UNKNOWN_HOLDER, Access


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


class Records(dict[str, bytes]):
    """Stored records."""

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        self.update({key: record for key, record in changes.items() if record is not None})
        for key, record in changes.items():
            if record is None:
                self.pop(key, None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def access(records: Records, clock: Clock) -> Access:
    return started(records, clock)


def started(records: Records, clock: Clock) -> Access:
    """Returns the access of a coordinator that starts with these records."""
    access = Access(records, records.write, clock)
    access.start()
    return access


def test_a_ticket_renews_itself_only_until_its_token_expires(access: Access, clock: Clock) -> None:
    made, token = access.create("ann", "submitter", 2.5 * TICKET_S)
    assert made.expires_at == clock.now + 2.5 * TICKET_S
    ticket, valid_s = access.ticket(access.verifier.identify(token), AccessRole.TRAINER, "job", "session-0", 1)
    for remaining_s in (2.5 * TICKET_S, 1.6 * TICKET_S, 0.7 * TICKET_S):
        assert valid_s == min(TICKET_S, remaining_s)
        clock.now += 0.9 * TICKET_S if remaining_s > TICKET_S else remaining_s - 1.0
        ticket, valid_s = access.ticket(access.verifier.identify(ticket), AccessRole.TRAINER, "job", "session-0", 1)
    assert valid_s == 1.0
    clock.now += 1.0
    with pytest.raises(errors.Unauthenticated, match="expired"):
        access.verifier.identify(ticket)


def test_a_connected_caller_is_refused_once_the_token_of_its_ticket_expires(access: Access, clock: Clock) -> None:
    _, token = access.create("ann", "submitter", 2 * TICKET_S)
    ticket, _ = access.ticket(access.verifier.identify(token), AccessRole.TRAINER, "job", "session-0", 1)
    caller, authorizer = access.verifier.identify(ticket), Authorizer(access.verifier)
    clock.now += 1.5 * TICKET_S  # the ticket has expired, but its holder has got another one
    authorizer.check_participant(caller, "job", "session-0", 1, reading=True)
    assert not access.has_ended(caller)
    clock.now += 0.5 * TICKET_S
    assert access.has_ended(caller)
    with pytest.raises(errors.Unauthenticated, match="expired"):
        authorizer.check_participant(caller, "job", "session-0", 1, reading=True)


def test_revoking_local_ends_the_access_files_of_earlier_starts(records: Records, clock: Clock) -> None:
    files = []
    for _ in range(3):
        access = started(records, clock)
        files.append(access.local_tokens())
        clock.now += 86_400.0
    running = access.verifier.identify(files[0][AccessRole.WORKER])  # a restart ends no ticket of a running trainer
    assert not access.has_ended(running)
    assert not access.tokens()  # they are not among the tokens that admins made
    assert {token.role for token in access.revoke("local")} == set(files[0])
    assert access.local_revoked
    renewed = access.local_tokens()
    assert not access.local_revoked
    after = started(records, clock)
    for each in (access, after):
        for token in (token for file in files for token in file.values()):
            with pytest.raises(errors.Unauthenticated, match="revoked"):
                each.verifier.identify(token)
        assert {each.verifier.identify(token).role for token in renewed.values()} == set(renewed)


def test_the_access_file_leaves_as_few_records_as_it_has_tokens(records: Records, clock: Clock) -> None:
    for _ in range(5):
        started(records, clock).local_tokens()
    assert len(records) == 1 + len(started(records, clock).local_tokens())
    clock.now += LOCAL_S
    access = started(records, clock)
    assert access.verifier.identify(access.local_tokens()[AccessRole.ADMIN]).name == "local"


@pytest.mark.parametrize("serial", ["xyz", "", "serial=1A", "1" * 65])
def test_a_certificate_is_revoked_by_its_serial_number_only(access: Access, serial: str) -> None:
    with pytest.raises(errors.BadRequest, match="is not a serial number in hexadecimal; `openssl") as refused:
        access.revoke(f"cert:{serial}")
    assert len(refused.value.message) < 200
    assert not access.tokens()


def test_the_revision_of_revoked_tokens_differs_for_other_tokens_only(
    access: Access, records: Records, clock: Clock
) -> None:
    revisions = [access.revocations.revision]
    for serial in ("1a", "2b", "2b"):
        access.revoke(f"cert:{serial}")
        revisions.append(access.revocations.revision)
    assert revisions[0] == 0
    assert len(set(revisions)) == 3
    assert access.revocations.tokens == ("cert:1a", "cert:2b")
    assert started(records, clock).revocations == access.revocations


def test_revoked_certificates_take_no_place_of_a_token(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_coordinator.access.MAX_TOKENS", 1)
    for serial in range(3):
        access.revoke(f"cert:{serial}")
    ann, _ = access.create("ann", "reader", 60.0)
    with pytest.raises(errors.LimitExceeded, match="1 tokens that have not expired, with the revoked ones"):
        access.create("bob", "reader", 60.0)
    assert access.revoke("ann") == [replace(ann, revoked=True)]


def test_revocations_of_certificates_are_limited(
    access: Access, records: Records, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent to every member. The tokens of admins have a limit of their own, so they can be revoked."""
    monkeypatch.setattr("shoal_coordinator.access.MAX_REVOCATIONS", 2)
    access.create("ann", "reader", 60.0)
    for serial in ("1", "2", "2"):
        access.revoke(f"cert:{serial}")
    for more in ("cert:3", "local-01234567"):
        with pytest.raises(errors.LimitExceeded, match="2 revoked certificates and tokens of access files"):
            access.revoke(more)
    assert len(access.revoke("ann")) == 1
    assert access.revoke("cert:1") == []
    clock.now += MAX_VALID_S
    access.revoke("cert:3")
    assert access.revocations.tokens == ("cert:3",)
    assert len(records) == 2, "expired ones are forgotten"


def test_the_revocation_of_a_certificate_that_has_called_is_kept_until_the_certificate_expires(
    access: Access, records: Records, clock: Clock
) -> None:
    """Whether it called before it was revoked, or is refused afterwards. Others are kept for ten years."""
    expires_at = clock.now + 60
    early, late = (Principal(name, AccessRole.READER, f"cert:{name}", expires_at=expires_at) for name in ("a", "b"))
    access.verifier.check(early)
    for serial in ("a", "b", "c"):
        access.revoke(f"cert:{serial}")
    with pytest.raises(errors.Unauthenticated, match="revoked"):
        access.verifier.check(late)
    access.create("somebody", "reader", 1.0)  # a change of the records also stores what is known of late
    clock.now = expires_at - 1
    for each in (access, started(records, clock)):
        assert each.revoked == {"cert:a", "cert:b", "cert:c"}
    clock.now = expires_at
    assert started(records, clock).revoked == {"cert:c"}
    access.create("other", "reader", 60.0)
    assert access.revoked == {"cert:c"}, "and without a restart, with the next change"
    assert len([key for key in records if "cert:" in key]) == 1


def test_a_revoked_certificate_has_the_holder_with_which_it_called(
    access: Access, records: Records, clock: Clock
) -> None:
    ann = Principal("ann", AccessRole.SUBMITTER, "cert:1a", expires_at=clock.now + 60)
    access.verifier.check(ann)
    access.revoke("cert:1A")
    access.revoke("cert:2b")
    for each in (access, started(records, clock)):
        assert [(it.id, it.name, it.role) for it in each.tokens()] == [
            ("cert:1a", "ann", AccessRole.SUBMITTER),
            ("cert:2b", UNKNOWN_HOLDER, AccessRole.READER),
        ]
    with pytest.raises(errors.BadRequest, match="there is no token"):
        access.revoke("ann")


@pytest.mark.parametrize("step_s", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("ahead_s", [-300.0, 0.0, 300.0])
def test_clocks_of_coordinator_and_servers_may_differ_by_five_minutes(ahead_s: float, step_s: float) -> None:
    """The wall clock of the server is ahead of the coordinator's, or that of the coordinator is stepped in mid-run."""
    passed, wall, begun = Clock(), Clock(), Clock.now + 0.9
    wall.now, passed.now = begun, 0.0
    access = Access({}, lambda _: None, wall)
    verifier = TokenVerifier(access.public_key, lambda: begun + passed.now + ahead_s, server="a")
    caller = Principal("worker-1", AccessRole.WORKER, "t1")
    tickets = TicketSource(lambda _: access.ticket(caller, AccessRole.WORKER, "job", "worker-1", 1), clock=passed)
    for half_seconds in range(3_000):
        passed.now = half_seconds / 2
        stepped = half_seconds > 400 and abs(ahead_s - step_s) <= 300.0  # the clocks never differ by more
        wall.now = begun + passed.now + (step_s if stepped else 0.0)
        assert verifier.identify(access.servers.token_for("a")).role is AccessRole.COORDINATOR
        assert verifier.identify(tickets()).job == "job"

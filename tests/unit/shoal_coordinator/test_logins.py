"""Codes of login links and sessions of browsers, by a fake clock."""

import pytest

from shoal import errors
from shoal._limits import catalogue
from shoal._security import ID_PREFIX, AccessRole, Principal
from shoal_coordinator.access import Access
from shoal_coordinator.logins import CODE_S, SESSION_S, Logins

ANN = Principal("ann", AccessRole.READER, "local-1")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(clock: Clock) -> Access:
    return Access({}, lambda _: None, clock)


@pytest.fixture
def logins(access: Access, clock: Clock) -> Logins:
    return Logins(access, clock)


def test_a_code_works_for_ten_minutes_and_a_session_for_twelve_hours(logins: Logins, clock: Clock) -> None:
    code = logins.new_code(ANN)
    clock.now += CODE_S - 1
    session, who = logins.log_in(code=code)
    assert who == ANN
    late = logins.new_code(ANN)
    clock.now += CODE_S
    with pytest.raises(errors.Unauthenticated, match="shoal page"):
        logins.log_in(code=late)
    clock.now += SESSION_S - CODE_S - 1
    assert logins.principal(session=session) == ANN
    clock.now += 1
    with pytest.raises(errors.Unauthenticated):
        logins.principal(session=session)


def test_a_code_works_once(logins: Logins) -> None:
    code = logins.new_code(ANN)
    logins.log_in(code=code)
    with pytest.raises(errors.Unauthenticated, match="was used"):
        logins.log_in(code=code)


def test_a_session_ends_with_the_token_that_it_was_made_for(logins: Logins, access: Access, clock: Clock) -> None:
    sessions = []
    for name in ("revoked", "expired"):
        made, token = access.create(name, "reader", 600.0)
        sessions.append((made, logins.log_in(token=token)[0]))
    (revoked, first), (_, second) = sessions
    access.revoke(revoked.id)
    with pytest.raises(errors.Unauthenticated, match="revoked"):
        logins.principal(session=first)
    assert logins.principal(session=second).name == "expired"
    clock.now += 600.0
    with pytest.raises(errors.Unauthenticated):
        logins.principal(session=second)


def test_a_session_is_no_code_and_a_code_no_session(logins: Logins) -> None:
    code = logins.new_code(ANN)
    session, _ = logins.log_in(code=code)
    with pytest.raises(errors.Unauthenticated):
        logins.principal(session=code)
    with pytest.raises(errors.Unauthenticated):
        logins.log_in(code=session)


def test_the_oldest_code_goes_beyond_the_limit(logins: Logins) -> None:
    codes = [logins.new_code(ANN) for _ in range(catalogue.PAGE_LOGIN_CODES.default + 1)]
    with pytest.raises(errors.Unauthenticated):
        logins.log_in(code=codes[0])
    assert logins.log_in(code=codes[1])[1] == logins.log_in(code=codes[-1])[1] == ANN


def test_codes_of_one_token_end_no_code_of_another(logins: Logins) -> None:
    bob = Principal("bob", AccessRole.READER, "token-of-bob")
    code = logins.new_code(bob)
    for _ in range(2 * catalogue.PAGE_LOGIN_CODES.default):
        logins.new_code(ANN)
    assert logins.log_in(code=code)[1] == bob


def test_a_restart_ends_a_session_which_is_no_token(logins: Logins, access: Access, clock: Clock) -> None:
    session, _ = logins.log_in(code=logins.new_code(ANN))
    for refused in (Logins(access, clock), logins):
        with pytest.raises(errors.Unauthenticated):
            refused.principal(session=session if refused is not logins else access.signer.sign(ANN, valid_s=60))
    with pytest.raises(errors.Unauthenticated):
        access.verifier.identify(session)
    with pytest.raises(errors.Unauthenticated):
        logins.principal(token=session)


def test_a_session_that_has_logged_out_is_over(logins: Logins) -> None:
    session, _ = logins.log_in(code=logins.new_code(ANN))
    another, _ = logins.log_in(code=logins.new_code(ANN))
    logins.log_out(session)
    assert logins.principal(session=another) == ANN
    with pytest.raises(errors.Unauthenticated):
        logins.principal(session=session)


def test_other_logouts_do_not_revive_a_session_that_has_logged_out(logins: Logins) -> None:
    session, _ = logins.log_in(code=logins.new_code(ANN))
    logins.log_out(session)
    for _ in range(1_100):
        logins.log_out("made up")
        logins.log_out(logins.log_in(code=logins.new_code(ANN))[0])
    with pytest.raises(errors.Unauthenticated):
        logins.principal(session=session)


def test_a_token_with_too_many_sessions_loses_its_oldest_one(logins: Logins) -> None:
    bob = Principal("bob", AccessRole.READER, "local-2")
    other, _ = logins.log_in(code=logins.new_code(bob))
    first, second, *_, last = (
        logins.log_in(code=logins.new_code(ANN))[0] for _ in range(catalogue.PAGE_LOGINS.default + 1)
    )
    with pytest.raises(errors.Unauthenticated, match="log in first"):
        logins.principal(session=first)
    assert logins.principal(session=second) == logins.principal(session=last) == ANN
    assert logins.principal(session=other) == bob


def test_a_session_stays_ended_when_the_record_of_its_token_is_removed(
    logins: Logins, access: Access, clock: Clock
) -> None:
    _, expiring = access.create("expiring", "reader", 600.0)
    revoked, other = access.create("revoked", "reader", 600.0)
    sessions = [logins.log_in(token=token)[0] for token in (expiring, other)]
    code = logins.new_code(access.verifier.identify(expiring))
    access.revoke(revoked.id)
    clock.now += 599.0
    sessions.append(logins.log_in(code=code)[0])
    clock.now += 1.0
    access.create("next", "reader", 600.0)  # removes the records of expired tokens
    for session in sessions:
        with pytest.raises(errors.Unauthenticated, match="expired"):
            logins.principal(session=session)


def test_a_session_ends_with_the_certificate_of_its_caller(logins: Logins, clock: Clock) -> None:
    caller = Principal("ann", AccessRole.READER, f"{ID_PREFIX}1f", expires_at=clock.now + 60)
    session, _ = logins.log_in(code=logins.new_code(caller))
    late = logins.new_code(caller)
    clock.now += 59
    assert logins.principal(session=session) == caller
    clock.now += 1
    with pytest.raises(errors.Unauthenticated, match=r"the certificate of reader 'ann' expired"):
        logins.principal(session=session)
    with pytest.raises(errors.Unauthenticated, match="certificate"):
        logins.log_in(code=late)

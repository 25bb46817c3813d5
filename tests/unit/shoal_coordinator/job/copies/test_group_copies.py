"""Decisions about the copies of one lock group."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import ServerRef

SERVERS = [ServerRef(f"s{number}", f"s{number}:1") for number in range(9)]
SHARDS = (0, 1)


def decisions(group: GroupCopies, new: ServerRef) -> dict[str, Callable[[], GroupCopies]]:
    """Returns what may be decided about a group, or happen to it. A copy is made on a new server."""
    found: dict[str, Callable[[], GroupCopies]] = {}
    if group.may_grow or group.may_move:
        found["grow"] = lambda: group.grow_on(new)
        if len(group.shards) > 1:
            found["split"] = lambda: group.split((1,))
    if group.may_move:
        found["grow behind"] = lambda: group.grow_on(new, behind_backup=True)
    if group.is_copied:
        made = group.backup is None or group.behind_backup
        found["made"] = group.made if made else group.replaced
    if group.backup and group.growing:
        found["keep"] = group.kept
    if group.second:
        found["alone"] = group.alone
    if group.backup:
        found["hand over"] = lambda: group.handed_over(keeps=group.grown)
    if not group.told:
        found["known"] = lambda: group.known()[0]
    return found


@given(st.data())
def test_a_server_that_had_a_copy_is_remembered_until_a_decision_is_known(data: st.DataObject) -> None:
    """Decisions follow each other that are never known, because servers die before they are told."""
    group, had = GroupCopies(0, SERVERS[0], shards=SHARDS), {SERVERS[0]}
    for _ in range(data.draw(st.integers(1, 12), label="decisions")):
        new = next(it for it in SERVERS if it not in group.servers)
        possible = decisions(group, new)
        name = data.draw(st.sampled_from(sorted(possible)))
        group = possible[name]()
        group.validate()
        had = {*group.servers} if name == "known" else had | {*group.servers}
        assert {*group.servers} == had
        assert all(group.has_copy_on(it.member) for it in had)
        assert GroupCopies.from_proto(group.to_proto(), {0: SHARDS}) == group


def test_the_record_of_an_earlier_version_has_one_former_server() -> None:
    group = GroupCopies(0, SERVERS[0], shards=SHARDS).grow_on(SERVERS[1]).made().handed_over(keeps=False)
    record = group.to_proto()
    assert record.former.member == "s0"
    assert not record.more_former
    assert GroupCopies.from_proto(record, {0: SHARDS}).former == (SERVERS[0],)

"""The table of audited calls names every call of the contract, and says of each what is recorded."""

from shoal._security import AUDITED, PERMISSIONS, AccessRole, Audited
from shoal.v1 import coordinator_pb2, group_pb2, job_pb2, parameter_server_pb2, token_pb2


def test_every_call_of_the_contract_is_in_the_table() -> None:
    files = (coordinator_pb2, group_pb2, job_pb2, parameter_server_pb2, token_pb2)
    calls = {
        f"{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert calls == {call for call in AUDITED if call.startswith("shoal.")}
    assert {call for call in PERMISSIONS if not call.startswith("http/")} <= AUDITED.keys()


def test_every_call_by_which_a_coordinator_changes_a_server_is_recorded() -> None:
    own = {call for call, roles in PERMISSIONS.items() if roles == {AccessRole.COORDINATOR}}
    assert own
    # The coordinator repeats AddBackup until the copy is complete.
    assert {call: AUDITED[call] for call in own} == {
        call: Audited.FIRST if call.endswith("AddBackup") else Audited.ALWAYS for call in own
    }


def test_what_readers_may_do_is_recorded_only_if_it_gives_them_rights() -> None:
    readers = {call for call, roles in PERMISSIONS.items() if AccessRole.READER in roles and call in AUDITED}
    recorded = {call for call in readers if AUDITED[call] is not Audited.REFUSED}
    assert recorded == {"shoal.v1.Tokens/GetTicket", "shoal.v1.Tokens/GetLoginLink"}

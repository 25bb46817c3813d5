"""The table of permissions names every call of the contract, and no other."""

import pytest

from shoal import errors
from shoal._security import OPEN_CALLS, PERMISSIONS, AccessRole, Principal, check_own, check_permitted
from shoal.v1 import coordinator_pb2, group_pb2, job_pb2, parameter_server_pb2, token_pb2


def test_every_call_of_the_contract_has_its_permissions() -> None:
    files = (coordinator_pb2, group_pb2, job_pb2, parameter_server_pb2, token_pb2)
    calls = {
        f"{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert calls == {call for call in PERMISSIONS if call.startswith("shoal.")}
    assert {call.partition("/")[0] for call in OPEN_CALLS} == {"grpc.health.v1.Health"}


def test_a_call_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(errors.Forbidden, match="only these roles may: nobody"):
        check_permitted(Principal("ann", AccessRole.ADMIN), "shoal.v1.Jobs/New")


def test_a_refusal_names_the_command_of_a_call() -> None:
    with pytest.raises(errors.Forbidden, match=r"'ann' may not list tokens \(`shoal token ls`\); only these roles"):
        check_permitted(Principal("ann", AccessRole.SUBMITTER), "shoal.v1.Tokens/ListTokens")


def test_people_never_get_the_permissions_of_processes() -> None:
    for role in (AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.READER):
        with pytest.raises(errors.Forbidden):
            check_permitted(Principal("ann", role), "shoal.v1.ParameterServer/CreateShards")


def test_a_reader_with_a_ticket_reads_and_does_no_more() -> None:
    observer = Principal("ann", AccessRole.OBSERVER, job="job")
    check_own(observer, "job", "", 0)
    for job, worker, incarnation in [("other", "", 0), ("job", "ann", 0), ("job", "", 1)]:
        with pytest.raises(errors.Forbidden):
            check_own(observer, job, worker, incarnation)

"""Resources of roles: what is asked for, and what the nodes lack."""

from typing import Any

import pytest

from shoal import errors
from shoal._engines import Request, check_resources, requests, shortage, waiting


def test_roles_that_are_not_named_have_the_default_resources() -> None:
    found = check_resources({"worker": {"CPU": 4, "GPU": 1, "disk": 0}})
    assert found == {"coordinator": {"CPU": 0.1}, "server": {"CPU": 0.4}, "worker": {"CPU": 4, "GPU": 1}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer": {"CPU": 1}}, "resources has 'trainer'"),
        ({"worker": 4}, "is 4"),
        ({"worker": {"CPU": "4"}}, "has 'CPU': '4'"),
        ({"worker": {"CPU": True}}, "has 'CPU': True"),
        ({"worker": {"CPU": -1}}, "give 0 or more"),
        ({"worker": {"CPU": float("inf")}}, "give 0 or more"),
        ({"server": {"CPU": 0}}, "asks for nothing"),
        (["worker"], "resources is"),
    ],
)
def test_bad_resources_are_refused(given: Any, message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        check_resources(given)


def test_the_default_cluster_fits_on_two_cores() -> None:
    wanted = requests(2, 2, check_resources(None))
    assert [request.name for request in wanted] == ["coordinator", "server-0", "server-1", "worker-0", "worker-1"]
    assert shortage(wanted, [{"CPU": 2.0, "memory": 1e10}]) == ""


def test_what_is_missing_is_named() -> None:
    wanted = requests(1, 3, check_resources({"worker": {"CPU": 2, "GPU": 1}}))
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert shortage(wanted, nodes) == (
        "the roles need 6.5 CPU, and there are 5 (1.5 missing); 3 GPU, and there are 1 (2 missing)"
    )


def test_one_role_needs_one_node() -> None:
    wanted = [Request("worker-0", {"CPU": 2.0, "GPU": 1.0})]
    assert shortage(wanted, [{"CPU": 8.0}, {"GPU": 4.0}]) == ("no single node has 2 CPU, 1 GPU, which worker-0 needs")
    assert shortage(wanted, [{"CPU": 8.0}, {"GPU": 1.0, "CPU": 2.0}]) == ""


def test_sums_of_fractions_are_not_too_large() -> None:
    assert shortage([Request(f"worker-{n}", {"CPU": 0.1}) for n in range(30)], [{"CPU": 3.0}]) == ""


def test_given_amounts_are_merged_with_the_default_ones() -> None:
    assert check_resources({"worker": {"GPU": 1}})["worker"] == {"CPU": 0.5, "GPU": 1}
    assert check_resources({"worker": {"CPU": 0, "GPU": 1}})["worker"] == {"GPU": 1}


def test_what_is_waited_for_and_what_is_free_are_named() -> None:
    wanted = [Request("worker-0", {"CPU": 5.0}), Request("worker-1", {"CPU": 5.0, "GPU": 1.0})]
    assert waiting(wanted[:1], {"CPU": 2.0, "memory": 1e9}) == "worker-0 needs 5 CPU, 2 CPU are free"
    assert waiting(wanted, {"CPU": 2.5}) == "worker-0 needs 5 CPU, worker-1 needs 5 CPU, 1 GPU, 2.5 CPU, 0 GPU are free"

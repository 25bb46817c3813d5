"""Command line and environment of a role that an engine starts."""

from pathlib import Path
from typing import Any

from shoal._engines import RolePlace, RoleSpec
from shoal._role.worker_options import THREADS

FOLDER = Path("/tmp/private")
TLS = ["--tls-ca", f"{FOLDER}/ca.pem", "--tls-cert", f"{FOLDER}/certificate.pem", "--tls-key", f"{FOLDER}/key.pem"]


def spec(role: str, name: str, **options: Any) -> RoleSpec:
    return RoleSpec(cluster="1a2b", role=role, name=name, ca=b"ca", certificate=b"mine", key=b"secret", **options)


def test_a_coordinator_keeps_its_ports_and_its_store_in_its_folder() -> None:
    place = RolePlace("10.0.0.1", "node", FOLDER, (71, 72, 73))
    assert spec("coordinator", "coordinator", flags=("--log-level", "info")).arguments(place) == [
        "coordinator",
        *TLS,
        *("--listen", "10.0.0.1:71", "--metrics-listen", "10.0.0.1:73", "--page-listen", "10.0.0.1:72"),
        *("--store", f"{FOLDER}/coordinator.db", "--log-level", "info", "--supervised"),
    ]
    assert place.address == "10.0.0.1:71"


def test_a_store_that_the_user_names_is_the_only_one() -> None:
    made = spec("coordinator", "coordinator", flags=("--store", "/shared/db"), page=False).arguments(
        RolePlace("10.0.0.1", "node", FOLDER)
    )
    assert made.count("--store") == 1
    assert made[made.index("--page-listen") + 1] == ""


def test_members_have_their_names_and_a_server_the_node_as_its_zone() -> None:
    place = RolePlace("10.0.0.2", "c0ffee", FOLDER, coordinator="10.0.0.1:71")
    listen = ("--listen", "10.0.0.2:0", "--metrics-listen", "10.0.0.2:0", "--coordinator", "10.0.0.1:71")
    server = spec("server", "server-1").arguments(place)
    assert server == ["server", *TLS, *listen, "--name", "server-1", "--zone", "c0ffee", "--supervised"]
    worker = spec("worker", "worker-0").arguments(place)
    assert worker == ["worker", *TLS, *listen, "--name", "worker-0", "--supervised"]


def test_no_role_inherits_an_identity_or_finds_an_access_file() -> None:
    inherited = {"PATH": "/bin", "TF_CONFIG": "{}", "SHOAL_POD_NAME": "pod", "XDG_STATE_HOME": "/home"}
    inherited |= {"SHOAL_COORDINATOR": "other:1", "SHOAL_TOKEN_FILE": "/home/token", "SHOAL_INSECURE": "1"}
    found = spec("worker", "worker-0", environment={"A": "1"}).variables(RolePlace("h", "z", FOLDER), inherited)
    assert {name: found[name] for name in found if name not in THREADS} == {
        "PATH": "/bin",
        "A": "1",
        "XDG_STATE_HOME": str(FOLDER),
    }


def test_the_representation_has_no_secret() -> None:
    assert "secret" not in repr(spec("server", "server-0", environment={"TOKEN": "secret"}))


def threads(inherited: dict[str, str], **options: Any) -> set[str]:
    found = spec("worker", "worker-0", **options).variables(RolePlace("h", "z", FOLDER, cores=9), inherited)
    return {found.get(name, "") for name in THREADS}


def test_a_role_has_the_threads_it_asked_for_or_its_share_of_the_cores() -> None:
    assert threads({}, threads=4, sharing=2) == {"4"}
    assert threads({}, sharing=2) == {"4"}
    assert threads({}, sharing=3) == {"3"}
    assert threads({}, sharing=20) == {"1"}
    assert threads({"OMP_NUM_THREADS": "7"}, threads=4) == {"7", ""}, "the user's number is another one"
    assert threads({}, threads=4, environment={"MKL_NUM_THREADS": "7"}) == {"7", ""}

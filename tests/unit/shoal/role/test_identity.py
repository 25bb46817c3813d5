"""Identity of a role from flags, variables, TF_CONFIG, the pod or defaults, and errors for invalid combinations."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from shoal import errors
from shoal._cli.app import app
from shoal._role import flags
from shoal._role.identity import RoleIdentity, address_warning, resolve, role_of_task
from shoal._system import tf_config as _tf_config

CLUSTER = {
    "chief": ["chief.example:7070"],
    "ps": ["10.0.0.1:2222", "10.0.0.2:2222"],
    "worker": ["w0:2222", "w1:2222", "[fd00::7]:2222"],
}
POD = {"SHOAL_POD_NAME": "server-0", "SHOAL_POD_NAMESPACE": "shoal", "SHOAL_SERVICE": "server"}


def tf_config(kind: object, index: object = 0, **changes: object) -> dict[str, str]:
    """An environment whose cluster has these lists changed, or taken out by None."""
    lists = {name: listed for name, listed in {**CLUSTER, **changes}.items() if listed is not None}
    return {"TF_CONFIG": json.dumps({"cluster": lists, "task": {"type": kind, "index": index}})}


def test_by_default_roles_are_on_loopback() -> None:
    assert resolve("coordinator", RoleIdentity(), {}) == RoleIdentity(listen="127.0.0.1:7070")
    expected = RoleIdentity(name="server-a-1", listen="127.0.0.1:0", coordinator="127.0.0.1:7070")
    assert resolve("server", RoleIdentity(), {"SHOAL_SERVICE": "ignored"}, "server-a-1") == expected


@pytest.mark.parametrize("role", ["server", "worker", "coordinator"])
def test_an_address_that_is_none_is_refused_with_its_option(role: str) -> None:
    with pytest.raises(errors.BadRequest, match="'localhost' is not an address for --listen; give host:port, such as"):
        resolve(role, RoleIdentity(name="a", listen="localhost"), {})
    if role != "coordinator":
        with pytest.raises(errors.BadRequest, match="'localhost' is not an address for --coordinator; give host:port"):
            resolve(role, RoleIdentity(name="a", coordinator="localhost"), {})


class TestTfConfig:
    @pytest.mark.parametrize(
        ("kind", "index", "expected"),
        [
            ("chief", 0, RoleIdentity(listen="0.0.0.0:7070", advertise="chief.example")),
            (
                "ps",
                1,
                RoleIdentity(
                    name="server-1", listen="0.0.0.0:2222", advertise="10.0.0.2", coordinator="chief.example:7070"
                ),
            ),
            (
                "worker",
                "2",
                RoleIdentity(
                    name="worker-2", listen="[::]:2222", advertise="[fd00::7]", coordinator="chief.example:7070"
                ),
            ),
        ],
    )
    def test_says_all_that_a_role_needs(self, kind: str, index: int | str, expected: RoleIdentity) -> None:
        environment = tf_config(kind, index)
        assert resolve(role_of_task(environment), RoleIdentity(), environment, "unused") == expected

    def test_a_master_is_a_chief(self) -> None:
        environment = tf_config("master", chief=None, master=["old:1"])
        assert resolve("coordinator", RoleIdentity(), environment).listen == "0.0.0.0:1"
        assert resolve("server", RoleIdentity(), tf_config("ps", chief=None, master=["old:1"])).coordinator == "old:1"

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "[::1]"])
    def test_a_cluster_on_one_machine_is_bound_to_it_alone(self, host: str) -> None:
        assert resolve("worker", RoleIdentity(), tf_config("worker", worker=[f"{host}:5"])).listen == f"{host}:5"

    def test_an_evaluators_address_is_of_no_use_and_no_harm(self) -> None:
        assert resolve("server", RoleIdentity(), tf_config("ps", 0, evaluator=["e:1"])).name == "server-0"

    def test_other_keys_are_others(self) -> None:
        value = {**json.loads(tf_config("ps")["TF_CONFIG"]), "environment": "cloud", "rpc_layer": "grpc"}
        assert resolve("server", RoleIdentity(), {"TF_CONFIG": json.dumps(value)}).name == "server-0"

    def test_flags_win_one_by_one(self) -> None:
        told = RoleIdentity(name="mine", coordinator="other:1")
        found = resolve("server", told, {**tf_config("ps", chief=None), **POD})
        assert found == RoleIdentity(name="mine", listen="0.0.0.0:2222", advertise="10.0.0.1", coordinator="other:1")

    def test_coordinator_is_warned_when_its_address_is_not_the_listed_one(self) -> None:
        """As in an image that sets SHOAL_LISTEN. Ports may be forwarded, so it starts."""
        environment = tf_config("chief", chief=["chief.example:2222"])
        found = resolve("coordinator", RoleIdentity(listen="0.0.0.0:7070"), environment)
        assert found.listen == "0.0.0.0:7070"
        said = address_warning("coordinator", found, environment)
        assert re.search(
            r"gives port 2222 .*, but it listens on 0\.0\.0\.0:7070; .*set SHOAL_LISTEN.* to an empty value", said
        )
        assert not address_warning("coordinator", resolve("coordinator", RoleIdentity(), environment), environment)
        assert not address_warning("coordinator", found, {})
        server = tf_config("ps")
        assert not address_warning("server", resolve("server", RoleIdentity(listen="0.0.0.0:7070"), server), server)

    def test_empty_variable_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So an image's variable is undone by an empty one."""
        seen = []

        def role(listen: flags.Listen = "") -> None:
            seen.append(listen)

        command = typer.Typer()
        command.command()(role)
        for value in ("", "here:1"):
            monkeypatch.setenv("SHOAL_LISTEN", value)
            assert CliRunner().invoke(command).exit_code == 0
        assert seen == ["", "here:1"]

    def test_coordinator_address_is_required_without_a_chief(self) -> None:
        with pytest.raises(
            errors.BadRequest, match=r"add cluster\.chief .* or give --coordinator or SHOAL_COORDINATOR"
        ):
            resolve("server", RoleIdentity(), {**tf_config("ps", chief=None), **POD})

    def test_another_roles_task(self) -> None:
        with pytest.raises(
            errors.BadRequest, match=r"task 1 of worker, a worker, and not a server; start `shoal worker`"
        ):
            resolve("server", RoleIdentity(), tf_config("worker", 1))

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "the value is not JSON"),
            ("[" * 100_000, "the value is not JSON"),
            ("9" * 5_000, "the value is not JSON"),
            ("[]", "no object"),
            ("null", "no object"),
            ("{}", "no object `cluster`; give an object such as"),
            ('{"cluster": []}', "no object `cluster`"),
            ('{"cluster": {"ps": ["a:1"]}}', "no object `task`; add one such as {"),
            ('{"cluster": {}, "task": {"type": "ps", "index": 0}}', "cluster lists no ps"),
        ],
    )
    def test_invalid_tf_config_is_refused(self, text: str, said: str) -> None:
        with pytest.raises(errors.BadRequest, match=re.escape(said)) as refused:
            resolve("server", RoleIdentity(), {"TF_CONFIG": text})
        assert refused.value.message.startswith("TF_CONFIG: ")

    @pytest.mark.parametrize("index", [-1, 2, 10**30, "2", "-1", "", "one", "\u0660", " 0", 0.0, 1.5, True, None, [0]])
    def test_an_index_that_is_no_place_in_the_list(self, index: float | str | list[int] | None) -> None:
        with pytest.raises(errors.BadRequest, match=r"task\.index is .*; give|task\.index is .*; give 0 to 1"):
            resolve("server", RoleIdentity(), tf_config("ps", index))

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("server", "use one of chief, master, ps, worker"),
            (None, "one of chief"),
            ([], "one of chief"),
            ("evaluator", "cluster lists no evaluator"),
            ("master", "cluster lists no master"),
        ],
    )
    def test_a_task_that_is_none_here(self, kind: str | list[Any] | None, said: str) -> None:
        with pytest.raises(errors.BadRequest, match=rf"task\.type is .*{said}"):
            resolve("server", RoleIdentity(), tf_config(kind))

    def test_an_evaluator_is_left_out(self) -> None:
        with pytest.raises(
            errors.BadRequest, match=r"task\.type is evaluator; workers evaluate .*, so leave this task out"
        ):
            resolve("server", RoleIdentity(), tf_config("evaluator", evaluator=["e:1"]))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"worker": ["w0:1", "w0:1"]}, "cluster.worker[0] and cluster.worker[1] are both w0:1"),
            ({"worker": ["10.0.0.2:2222"]}, "cluster.ps[1] and cluster.worker[0] are both 10.0.0.2:2222"),
            ({"worker": ["CHIEF.example:07070"]}, "cluster.chief[0] and cluster.worker[0] are both"),
            ({"evaluator": ["w1:2222"]}, "cluster.worker[1] and cluster.evaluator[0] are both"),
            ({"chief": ["a:1", "b:1"]}, "lists 2 chiefs"),
            ({"master": ["m:1"]}, "lists 2 chiefs"),
            ({"worker": []}, "cluster.worker is []; give a list of one or more addresses, or leave it out"),
            ({"worker": "w0:1"}, "cluster.worker is 'w0:1'; give a list"),
            ({"gpu": ["a:1"]}, "cluster has the key 'gpu'; use only chief, master, ps, worker, evaluator"),
            *(
                ({"worker": ["w0:1", address]}, "cluster.worker[1] is ")
                for address in (
                    "w1",
                    "w1:",
                    ":1",
                    "w1:0",
                    "w1:65536",
                    "grpc://w1:1",
                    "a b:1",
                    "::1:1",
                    "w1:\u0661",
                    7,
                    None,
                )
            ),
        ],
    )
    def test_a_cluster_that_cannot_be(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(errors.BadRequest, match=re.escape(said)):
            resolve("server", RoleIdentity(), tf_config("ps", **changes))

    def test_error_about_a_long_value_fits_one_line(self) -> None:
        with pytest.raises(errors.BadRequest) as refused:
            resolve("server", RoleIdentity(), tf_config("ps", ps=["x" * 100_000]))
        assert len(refused.value.message) < 300


ADDRESSES = st.sampled_from(["a:1", "b:1", "c:2", "localhost:3", "[::1]:4", "d", "e:0", ""])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ADDRESSES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.sampled_from(["a"]), inner, max_size=4),
    max_leaves=12,
)
TYPES = st.sampled_from(["chief", "master", "ps", "worker", "evaluator", "other"])
NEARLY = st.fixed_dictionaries(
    {
        "cluster": st.dictionaries(TYPES, st.lists(ADDRESSES, max_size=3) | ANYTHING, max_size=4) | ANYTHING,
        "task": st.fixed_dictionaries({"type": TYPES | ANYTHING, "index": st.integers(-1, 3) | ANYTHING}) | ANYTHING,
    }
)


@given(value=ANYTHING | NEARLY)
@example(value=json.loads(tf_config("ps", 1)["TF_CONFIG"]))
def test_any_json_is_understood_or_refused_with_one_error(value: Any) -> None:
    with contextlib.suppress(errors.BadRequest):
        task = _tf_config.read(json.dumps(value))
        assert value["cluster"][task.type][task.index] == f"{task.host}:{task.port}"
        found = resolve(task.role, RoleIdentity(coordinator="given:1"), {"TF_CONFIG": json.dumps(value)})
        assert found.listen.endswith(f":{task.port}")
        assert found.advertise == task.host


@given(text=st.text())
def test_any_text_is_understood_or_refused_with_one_error(text: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"^TF_CONFIG: "):
        _tf_config.read(text)


class TestPod:
    def test_of_a_headless_service(self) -> None:
        assert resolve("server", RoleIdentity(), POD, "unused") == RoleIdentity(
            name="server-0",
            listen="0.0.0.0:7070",
            advertise="server-0.server.shoal.svc",
            coordinator="coordinator.shoal.svc:7070",
        )
        here = {"SHOAL_POD_NAME": "server-0", "SHOAL_SERVICE": "server"}
        found = resolve("server", RoleIdentity(listen="0.0.0.0:9"), here)
        assert (found.advertise, found.coordinator, found.listen) == (
            "server-0.server",
            "coordinator:7070",
            "0.0.0.0:9",
        )

    @pytest.mark.parametrize(
        ("address", "advertise", "listen"),
        [("10.1.2.3", "10.1.2.3", "0.0.0.0:7070"), ("fd00::1", "[fd00::1]", "[::]:7070")],
    )
    def test_of_a_deployment(self, address: str, advertise: str, listen: str) -> None:
        environment = {"SHOAL_POD_NAME": "worker-7d9f-x2x4k", "SHOAL_POD_IP": address}
        found = resolve("worker", RoleIdentity(coordinator="c:1"), environment)
        assert found == RoleIdentity(name="worker-7d9f-x2x4k", listen=listen, advertise=advertise, coordinator="c:1")

    def test_of_the_coordinator(self) -> None:
        environment = {**POD, "SHOAL_POD_NAME": "coordinator-0", "SHOAL_SERVICE": "coordinator"}
        assert resolve("coordinator", RoleIdentity(), environment) == RoleIdentity(
            listen="0.0.0.0:7070", advertise="coordinator-0.coordinator.shoal.svc"
        )

    def test_server_without_a_reachable_address_is_refused(self) -> None:
        environment = {"SHOAL_POD_NAME": "server-0"}
        with pytest.raises(errors.BadRequest, match="set SHOAL_SERVICE to its headless service, or SHOAL_POD_IP"):
            resolve("server", RoleIdentity(), environment)
        assert resolve("worker", RoleIdentity(), environment).advertise == ""
        for told in (RoleIdentity(advertise="here"), RoleIdentity(listen="10.0.0.1:7070")):
            assert resolve("server", told, environment).name == "server-0"


@pytest.mark.parametrize("name", ["Server_0", "a.b", "x" * 64])
def test_invalid_name_is_refused(name: str) -> None:
    for told, environment in (
        (RoleIdentity(name=name), {}),
        (RoleIdentity(), {"SHOAL_POD_NAME": name, "SHOAL_POD_IP": "::1"}),
    ):
        with pytest.raises(errors.BadRequest, match=r"1 to 63 characters .* --name or SHOAL_NAME"):
            resolve("server", told, environment)


class TestCommands:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
        def run(*arguments: str, **environment: str) -> Result:
            for name, value in {"COLUMNS": "240", **environment}.items():
                monkeypatch.setenv(name, value)
            return CliRunner().invoke(app, arguments)

        yield run
        structlog.reset_defaults()  # a role's log goes to the standard error that it had

    def test_a_server_does_not_start_with_an_invalid_zone(self, run: Callable[..., Result]) -> None:
        for done in (
            run("server", "--zone", "Rack 4", "--name", "s0"),
            run("server", "--name", "s0", SHOAL_ZONE="Rack 4"),
        ):
            assert done.exit_code == 2
            assert "the zone 'Rack 4' of server s0 is not valid" in done.stderr
            assert "with --zone or SHOAL_ZONE" in done.stderr

    def test_a_role_does_not_start_under_anothers_task(self, run: Callable[..., Result]) -> None:
        done = run("server", **tf_config("worker"))
        assert done.exit_code == 2
        assert "cannot start" in done.stderr
        assert "`shoal run`" in done.stderr

    def test_run_needs_a_task(self, run: Callable[..., Result]) -> None:
        done = run("run")
        assert done.exit_code == 2
        assert "TF_CONFIG is not set" in done.stderr

    def test_run_refuses_invalid_options(self, run: Callable[..., Result]) -> None:
        done = run("run", TF_CONFIG="[")
        assert done.exit_code == 2
        assert "TF_CONFIG: the value is not JSON" in done.stderr

    @pytest.mark.parametrize(("kind", "flag"), [("chief", "--store"), ("ps", "--lane-port"), ("worker", "--device")])
    def test_run_is_the_command_of_the_tasks_role(self, run: Callable[..., Result], kind: str, flag: str) -> None:
        """It reads that role's flags: those of the others are none."""
        options = {"--store": "memory", "--lane-port": "0", "--device": "cpu"}
        for other, value in options.items():
            done = run("run", other, value, "--log-level", "wrong", **tf_config(kind))
            assert done.exit_code == 2
            assert ("--log-level" if other == flag else "No such option") in done.stderr

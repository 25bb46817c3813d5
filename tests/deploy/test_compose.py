"""Checks of the compose file without an engine: services are confined, bound to loopback and pinned; files exist."""

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.sdk.trace import TracerProvider

from shoal._tracing import environment as tracing
from shoal_coordinator.main import coordinator
from shoal_server.main import server
from shoal_worker.main import worker
from support.deployment import docker_engine
from support.deployment.compose_stack import COMPOSE_FILE, compose_file, default_of_variables

FILE = compose_file()
SERVICES = FILE["services"]
ROLES = ["coordinator", "server-0", "server-1", "worker", "worker-gpu"]
ROOT = Path(__file__).parents[2]
TRACING = (ROOT / "docs" / "how-to" / "tracing.md").read_text()
SERVERS = ["server-0", "server-1"]
WORKERS = ["worker", "worker-gpu"]


def seconds(text: str) -> int:
    """Returns the seconds of a duration such as 70s or 1m10s. Compose 1 makes fractions of others, which fail."""
    found = re.fullmatch(r"(?:(\d+)m)?(\d+)s", text)
    assert found
    minutes, whole = found.groups(default="0")
    return 60 * int(minutes) + int(whole)


@pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))
class TestEveryService:
    def test_it_is_confined(self, service: dict[str, Any]) -> None:
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"])
        assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & set(service)

    def test_it_is_looked_after(self, service: dict[str, Any]) -> None:
        assert service["healthcheck"]["test"][0] == "CMD"
        assert service["restart"] == "unless-stopped"
        assert seconds(service["stop_grace_period"]) >= 30

    def test_it_is_bounded(self, service: dict[str, Any]) -> None:
        assert service["pids_limit"] > 0
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}

    def test_its_ports_are_this_hosts_alone(self, service: dict[str, Any]) -> None:
        assert [port for port in service.get("ports", []) if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)] == []

    def test_its_image_is_pinned(self, service: dict[str, Any]) -> None:
        _, _, tag = service["image"].partition(":")
        assert re.match(r"v?\d+\.\d+\.\d+", tag)

    def test_what_it_mounts_is_there(self, service: dict[str, Any]) -> None:
        sources = [mount.split(":")[0] for mount in service.get("volumes", [])]
        paths = [source for source in sources if source.startswith(".")]
        assert [path for path in paths if not (COMPOSE_FILE.parent / path).exists()] == []
        assert [name for name in sources if name not in paths and name not in FILE["volumes"]] == []

    def test_what_is_the_hosts_is_only_read(self, service: dict[str, Any]) -> None:
        mounts = [mount for mount in service.get("volumes", []) if mount.startswith(".")]
        assert all(mount.endswith(":ro") for mount in mounts)

    def test_any_number_of_projects_can_have_it(self, service: dict[str, Any]) -> None:
        assert "container_name" not in service

    def test_what_it_waits_for_says_that_it_is_well(self, service: dict[str, Any]) -> None:
        conditions = [waits["condition"] for waits in service.get("depends_on", {}).values()]
        assert set(conditions) <= {"service_healthy"}


def test_it_has_none_of_the_keys_that_compose_1_or_2_complains_of() -> None:
    assert "version" not in FILE  # Compose 2 calls it obsolete
    assert "name" not in FILE  # Compose 1 knows no such key


def test_servers_keep_their_names() -> None:
    names = [SERVICES[name]["environment"]["SHOAL_NAME"] for name in SERVERS]
    assert names == [SERVICES[name]["environment"]["SHOAL_ADVERTISE"] for name in SERVERS] == SERVERS


def test_servers_and_workers_see_the_same_memory() -> None:
    assert all("memory:/dev/shm:nocopy" in SERVICES[role]["volumes"] for role in ROLES if role != "coordinator")
    assert FILE["volumes"]["memory"]["driver_opts"]["type"] == "tmpfs"


def test_coordinator_and_servers_see_the_same_checkpoints() -> None:
    for role in ["coordinator", *SERVERS]:
        folder = SERVICES[role]["environment"]["SHOAL_CHECKPOINTS"]
        assert f"checkpoints:{folder}" in SERVICES[role]["volumes"]


@pytest.mark.parametrize("role", WORKERS)
def test_workers_can_be_scaled(role: str) -> None:
    assert "ports" not in SERVICES[role]
    assert "SHOAL_NAME" not in SERVICES[role]["environment"]


@pytest.mark.parametrize(
    ("service", "command", "flag", "variable"),
    [
        ("coordinator", coordinator, "heartbeat_timeout", "SHOAL_HEARTBEAT_TIMEOUT"),
        ("coordinator", coordinator, "server_return_timeout", "SHOAL_SERVER_RETURN_TIMEOUT"),
        *((name, server, "grace_period", "SHOAL_GRACE_PERIOD") for name in SERVERS),
        *((name, worker, "grace_period", "SHOAL_GRACE_PERIOD") for name in WORKERS),
    ],
)
def test_what_nobody_sets_is_as_in_the_code(
    service: str, command: Callable[[], None], flag: str, variable: str
) -> None:
    default = inspect.signature(command).parameters[flag].default
    assert float(SERVICES[service]["environment"][variable]) == default


@pytest.mark.parametrize("role", [*SERVERS, *WORKERS])
@pytest.mark.parametrize("grace_s", [None, 7, 240])
def test_who_is_told_to_stop_has_its_grace_and_time_to_end(role: str, grace_s: int | None) -> None:
    variable = f"SHOAL_{role.partition('-')[0].upper()}_GRACE_PERIOD"
    service = compose_file(**{variable: str(grace_s)} if grace_s else {})["services"][role]
    told_s = float(service["environment"]["SHOAL_GRACE_PERIOD"])
    assert grace_s in {None, told_s}
    assert seconds(service["stop_grace_period"]) >= told_s + 10


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_traced_until_a_collector_is_named(role: str) -> None:
    assert tracing.enabling_variable(SERVICES[role]["environment"]) == ""
    endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
    told = compose_file(**{endpoint: "http://collector:4317"})["services"][role]["environment"]
    assert tracing.enabling_variable(told) == endpoint


@pytest.mark.parametrize("role", ROLES)
def test_the_docs_collector_is_a_service_and_the_lines_for_it_are_settings(role: str) -> None:
    collector, *_ = re.findall(r"```yaml\n(services:.*?)```", TRACING, re.DOTALL)
    lines, *_ = re.findall(r"```\n(OTEL_.*?)```", TRACING, re.DOTALL)
    settings = dict(line.split("=", 1) for line in lines.splitlines())
    assert settings.items() <= compose_file(**settings)["services"][role]["environment"].items()
    [name] = yaml.safe_load(collector)["services"]
    assert settings["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{name}:4317"


@pytest.mark.parametrize("role", ROLES)
def test_every_step_is_traced_until_a_sampler_is_named(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = TracerProvider().sampler.get_description()
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"):
        monkeypatch.setenv(name, SERVICES[role]["environment"][name])
    assert TracerProvider().sampler.get_description() == defaults
    assert not caplog.records


def test_memory_is_bounded_where_somebody_says_so() -> None:
    variables = {role: f"SHOAL_{role.partition('-')[0].upper()}_MEMORY" for role in ROLES if role != "coordinator"}
    assert set(variables.values()) <= default_of_variables().keys()
    assert {SERVICES[role]["mem_limit"] for role in variables} == {0}


def test_without_a_profile_there_are_the_cpus_roles() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ROLES[:-1]


def test_its_image_is_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {SERVICES[role]["image"] for role in ROLES} == {f"shoal:{version}", f"shoal:{version}-gpu"}


def test_the_example_of_an_environment_has_the_defaults() -> None:
    lines = (COMPOSE_FILE.parent / ".env.example").read_text().splitlines()
    sample = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert sample == default_of_variables()


def built(image: str) -> dict[str, Any]:
    """Returns how an image is built, from the only service that builds it."""
    build: dict[str, Any]
    [build] = [service["build"] for service in SERVICES.values() if service["image"] == image and "build" in service]
    return build


@pytest.mark.parametrize("image", sorted({SERVICES[role]["image"] for role in ROLES}))
def test_an_image_is_built_once(image: str) -> None:
    # Compose 1 would build it for each service that has a build, and Compose 2 for all at once, of one tag.
    assert (COMPOSE_FILE.parent / built(image)["context"] / "Dockerfile").is_file()


def test_the_image_is_built_before_others_want_it() -> None:
    # Compose 1 builds in the order of what waits for what, and would look in a registry for what is not there yet.
    assert "build" in SERVICES["coordinator"]
    assert all("coordinator" in SERVICES[role]["depends_on"] for role in ROLES[1:])


@pytest.mark.parametrize("worker", WORKERS)
def test_the_image_has_what_the_examples_import(worker: str) -> None:
    assert "demo" in built(SERVICES[worker]["image"])["args"]["EXTRAS"].split(",")
    [mount] = [mount for mount in SERVICES[worker]["volumes"] if mount.endswith(":/programs:ro")]
    assert (Path(COMPOSE_FILE.parent) / mount.split(":")[0] / "digits.py").is_file()


def test_the_image_starts_from_the_dockerfiles_base() -> None:
    assert built(SERVICES["coordinator"]["image"])["args"]["BASE"] == docker_engine.base_of()


def test_the_gpus_image_starts_from_cudas() -> None:
    assert built(SERVICES["worker-gpu"]["image"])["target"] == "gpu"
    assert built(SERVICES["worker-gpu"]["image"])["args"]["BASE"].startswith("nvidia/cuda:")

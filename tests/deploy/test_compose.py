"""Checks of the compose file without an engine: services are confined, bound to loopback and pinned; files exist."""

import inspect
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from opentelemetry.sdk.trace import TracerProvider

from shoal._security import VARIABLES, AccessRole, role_name
from shoal._security.tls import TlsFiles
from shoal._tracing import environment as tracing
from shoal_coordinator.main import coordinator
from shoal_server.main import server
from shoal_worker.main import worker
from support.deployment import docker_engine
from support.deployment.compose_stack import COMPOSE_FILE, compose_file, default_of_variables

FILE = compose_file()
SERVICES = FILE["services"]
ROLES = ["coordinator", "server-0", "server-1", "worker", "worker-gpu"]
# Services that run one command and end.
COMMANDS = ["certs", "client"]
# The service that may see each volume of certificates, by the beginning of its name, beside `certs`.
TLS = {"tls-ca": "certs", "tls-submitter": "client", "tls-reader": "prometheus"} | {
    f"tls-{role}": role for role in ("coordinator", "server", "worker")
}
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
        assert not {"privileged", "cap_add", "pid", "devices"} & set(service)
        assert service.get("network_mode", "none") == "none"

    def test_it_is_looked_after(self, service: dict[str, Any]) -> None:
        if service in [SERVICES[name] for name in COMMANDS]:
            assert (service["healthcheck"], service["restart"]) == ({"disable": True}, "no")
            return
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
        for name, waits in service.get("depends_on", {}).items():
            ended = name == "certs"
            assert waits["condition"] == ("service_completed_successfully" if ended else "service_healthy")

    def test_it_has_tls_and_is_not_insecure(self, service: dict[str, Any]) -> None:
        variables = service.get("environment", {})
        assert "SHOAL_INSECURE" not in variables
        if service in [SERVICES[name] for name in (*ROLES, "client")]:
            files = {f"/etc/shoal/tls/{name}.pem" for name in ("ca", "cert", "key")}
            assert {variables[name] for name in VARIABLES} == files
        if service in [SERVICES[name] for name in ("worker", "worker-gpu")]:  # trainers do not present its certificate
            assert variables["SHOAL_TRAINER_TLS_CERT"] == "/etc/shoal/tls/trainer.pem"
            assert variables["SHOAL_TRAINER_TLS_KEY"] == "/etc/shoal/tls/trainer-key.pem"


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
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["certs", *ROLES[:-1]]


@pytest.mark.parametrize("volume", TLS)
def test_a_key_is_seen_by_its_role_alone(volume: str) -> None:
    mounts = {
        name: mount.removeprefix(volume)
        for name, service in SERVICES.items()
        for mount in service.get("volumes", [])
        if mount.split(":")[0] == volume
    }
    made = mounts.pop("certs")
    assert made == f":/var/lib/shoal/tls/{volume.removeprefix('tls-')}"
    assert {name.split("-")[0] for name in mounts} == {TLS[volume]} - {"certs"}
    assert all(mount.endswith("/tls:ro") for mount in mounts.values())
    assert volume in FILE["volumes"]


def test_the_certificates_name_the_hosts_of_their_roles() -> None:
    advertised = {name: SERVICES[name]["environment"].get("SHOAL_ADVERTISE") for name in ROLES}
    named = {tuple(host.split("=")) for host in SERVICES["certs"]["command"]}
    assert named == {(name.split("-")[0], host or "worker") for name, host in advertised.items()}


def make_certs(folder: Path, *hosts: str) -> dict[str, bytes]:
    """Returns the files that certs.sh leaves in the folders of the volumes, as `certs` runs it."""
    script = (COMPOSE_FILE.parent / "certs.sh").read_text()
    copy = folder / "certs.sh"
    copy.write_text(script.replace("/var/lib/shoal/tls", str(folder / "tls")))
    for volume in TLS:
        (folder / "tls" / volume.removeprefix("tls-")).mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(folder)}
    subprocess.run(["sh", str(copy), *hosts], check=True, env=environment, capture_output=True)
    return {str(file.relative_to(folder / "tls")): file.read_bytes() for file in (folder / "tls").glob("*/*")}


class TestCertificates:
    """The script of the service `certs`."""

    def test_it_makes_the_files_of_each_role(self, tmp_path: Path) -> None:
        made = make_certs(tmp_path, *SERVICES["certs"]["command"])
        roles = [volume.removeprefix("tls-") for volume in TLS if volume != "tls-ca"]
        expected = {f"{role}/{name}.pem" for role in roles for name in ("ca", "cert", "key")}
        expected |= {"worker/trainer.pem", "worker/trainer-key.pem"}
        assert made.keys() == expected | {"ca/ca.pem", "ca/ca-key.pem", "ca/issued"}
        modes = {name: (tmp_path / "tls" / name).stat().st_mode & 0o777 for name in made if "key" in name}
        assert {name for name, mode in modes.items() if mode != 0o600} == {"reader/key.pem"}
        assert modes["reader/key.pem"] == 0o640  # Prometheus has another user and the same group
        for role in roles:
            files = [tmp_path / "tls" / role / f"{name}.pem" for name in ("ca", "cert", "key")]
            if role != "reader":
                assert TlsFiles(*files).has_certificate
        trainers = [tmp_path / "tls" / "worker" / name for name in ("ca.pem", "trainer.pem", "trainer-key.pem")]
        assert TlsFiles(*trainers).has_certificate
        names = names_of(tmp_path / "tls" / "server" / "cert.pem")
        assert {"server-0", "server-1", role_name(AccessRole.SERVER)} <= names
        assert not {"coordinator", "worker", role_name(AccessRole.COORDINATOR)} & names

    def test_it_keeps_them_until_a_host_is_added_or_half_a_year_has_passed(self, tmp_path: Path) -> None:
        first = make_certs(tmp_path, "server=server-0")
        assert make_certs(tmp_path, "server=server-0") == first
        added = make_certs(tmp_path, "server=server-0", "server=server-1")
        assert "server-1" in names_of(tmp_path / "tls" / "server" / "cert.pem")
        assert (added["ca/ca.pem"], added["ca/ca-key.pem"]) == (first["ca/ca.pem"], first["ca/ca-key.pem"])
        long_ago = time.time() - 183 * 86_400
        os.utime(tmp_path / "tls" / "ca" / "issued", (long_ago, long_ago))
        renewed = make_certs(tmp_path, "server=server-0", "server=server-1")
        assert renewed["worker/cert.pem"] != added["worker/cert.pem"]
        assert renewed["ca/ca.pem"] == first["ca/ca.pem"]

    def test_it_replaces_those_that_do_not_name_their_roles(self, tmp_path: Path) -> None:
        first = make_certs(tmp_path, "server=server-0")
        # As an earlier version left it.
        (tmp_path / "tls" / "ca" / "issued").rename(tmp_path / "tls" / "ca" / "hosts")
        second = make_certs(tmp_path, "server=server-0")
        assert second["server/cert.pem"] != first["server/cert.pem"]
        # As an earlier version left it, without the files of trainers.
        (tmp_path / "tls" / "worker" / "trainer.pem").unlink()
        assert make_certs(tmp_path, "server=server-0")["worker/trainer.pem"] != second["worker/trainer.pem"]


def names_of(file: Path) -> set[str]:
    """Returns the DNS names in a certificate."""
    extensions = x509.load_pem_x509_certificate(file.read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names.get_values_for_type(x509.DNSName))


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
    assert "build" in SERVICES["certs"]
    assert "certs" in SERVICES["coordinator"]["depends_on"]
    assert all("coordinator" in SERVICES[role]["depends_on"] for role in (*ROLES[1:], "client"))


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_have_the_examples(worker: str) -> None:
    [mount] = [mount for mount in SERVICES[worker]["volumes"] if mount.endswith(":/programs:ro")]
    assert (Path(COMPOSE_FILE.parent) / mount.split(":")[0] / "digits.npz").is_file()


def test_the_image_starts_from_the_dockerfiles_base() -> None:
    assert built(SERVICES["coordinator"]["image"])["args"]["BASE"] == docker_engine.base_of()


def test_the_gpus_image_starts_from_cudas() -> None:
    assert built(SERVICES["worker-gpu"]["image"])["target"] == "gpu"
    assert built(SERVICES["worker-gpu"]["image"])["args"]["BASE"].startswith("nvidia/cuda:")

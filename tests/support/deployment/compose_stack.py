"""Cluster of deploy/compose on a Docker engine of the tests."""

import json
import os
import re
import secrets
import shlex
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

import shoal
from shoal._security import Credentials
from support.deployment.docker_engine import ROOT, Engine, run

COMPOSE_FILE = ROOT / "deploy" / "compose" / "docker-compose.yml"
PORTS = ("SHOAL_PORT", "SHOAL_PAGE_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def compose_file(**environment: str) -> dict[str, Any]:
    """Returns the compose file as Compose reads it in this environment, with the defaults of missing variables."""
    filled = _VARIABLE.sub(lambda found: environment.get(found.group(1)) or found.group(2), COMPOSE_FILE.read_text())
    loaded: dict[str, Any] = yaml.safe_load(filled)
    return loaded


def default_of_variables() -> dict[str, str]:
    """Returns the variables of the compose file with their default values."""
    return dict(_VARIABLE.findall(COMPOSE_FILE.read_text()))


class Stack:
    """A Compose project on free ports.

    Attributes:
        project: its name, which is a label of everything that it creates.
        environment: the environment in which commands refer to this project.
        ports: ports of this host, by the variable that sets them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.project = f"e2e{secrets.token_hex(3)}"
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        ports = {name: str(port) for name, port in self.ports.items()}
        # The engine has no bridge of its own, so what a build fetches it fetches by the host's network.
        override = engine.folder / "override.yml"
        override.write_text("services: {certs: {build: {network: host}}}\n")
        self.environment = {
            **engine.environment,
            **ports,
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_FILE": f"{COMPOSE_FILE}{os.pathsep}{override}",
        }

    @property
    def page(self) -> str:
        """The URL of the coordinator's page."""
        return f"https://127.0.0.1:{self.ports['SHOAL_PAGE_PORT']}"

    def compose(self, *arguments: str) -> str:
        """Returns what `docker-compose ARGUMENTS` prints."""
        return run(["docker-compose", *arguments], self.environment)

    def terminal(self, commands: str, folder: Path, **environment: str) -> str:
        """Returns what typed lines of a shell print on a terminal. Raises RuntimeError if one of them fails."""
        command = [
            "script",
            "--quiet",
            "--return",
            "--command",
            shlex.join(["bash", "-ec", f"cd {folder}\n{commands}"]),
        ]
        return run([*command, "/dev/null"], {**self.environment, **environment})

    def client(self) -> shoal.Client:
        """Yields a client on this host, a submitter, which retries while the coordinator is away."""
        folder = self.certificates
        credentials = Credentials.find(*(str(folder / f"{name}.pem") for name in ("ca", "cert", "key")))
        return shoal.Client(f"127.0.0.1:{self.ports['SHOAL_PORT']}", retry_for_s=60, credentials=credentials)

    @cached_property
    def certificates(self) -> Path:
        """The folder with the files of a submitter, which the command of the docs copies. The engine removes it."""
        home = self._engine.folder / self.project
        home.mkdir()
        page = (ROOT / "docs" / "how-to" / "compose.md").read_text()
        [command] = re.findall(r"^mkdir .*docker-compose run .*$", page, re.MULTILINE)
        self.terminal(command, COMPOSE_FILE.parent, HOME=str(home))
        [folder] = home.iterdir()
        return folder

    def tls(self, certificate: bool = True) -> ssl.SSLContext:
        """Returns a TLS context that trusts the cluster's CA, by default with the certificate of a submitter."""
        context = ssl.create_default_context(cafile=self.certificates / "ca.pem")
        if certificate:
            context.load_cert_chain(self.certificates / "cert.pem", self.certificates / "key.pem")
        return context

    def containers(self, *services: str) -> list[str]:
        """Returns the ids of the containers of these services, or of all services. Ended containers are included."""
        return self.compose("ps", "--quiet", *services).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Returns the engine's description of a container."""
        found: list[dict[str, Any]] = json.loads(self._engine.docker("inspect", container))
        return found[0]

    def address(self, container: str) -> str:
        """Returns the address of a container in the project's network. This host can reach it."""
        [network] = self.inspect(container)["NetworkSettings"]["Networks"].values()
        return str(network["IPAddress"])

    def inside(self, container: str, *command: str) -> str:
        """Returns what a command prints in a container."""
        return self._engine.docker("exec", container, *command)

    def kill(self, container: str) -> None:
        """Kills a container, as `docker kill` does. Docker does not restart it, because the user asked for the kill."""
        self._engine.docker("kill", container)

    def start(self, container: str) -> None:
        self._engine.docker("start", container)

    def logs(self, container: str) -> str:
        """Returns the log of a container, with that of its earlier runs."""
        return self._engine.docker("logs", container, errors=True)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the series of a Prometheus query. Raises RuntimeError if the expression is invalid."""
        found: list[dict[str, Any]] = self._prometheus(f"query?{urllib.parse.urlencode({'query': expression})}")[
            "result"
        ]
        return found

    def targets(self) -> list[dict[str, Any]]:
        """Returns the targets of Prometheus; none before Prometheus runs."""
        try:
            found: list[dict[str, Any]] = self._prometheus("targets")["activeTargets"]
        except OSError:
            return []
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Returns the rules that Prometheus has loaded."""
        return [rule for group in self._prometheus("rules")["groups"] for rule in group["rules"]]

    def _prometheus(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/{path}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{url}: {error.read().decode(errors='replace')}") from None

    def left(self) -> dict[str, list[str]]:
        """Returns what is left of the project: containers, volumes and networks."""
        label = f"label=com.docker.compose.project={self.project}"
        listings = {
            "containers": ("ps", "--all", "--quiet"),
            "volumes": ("volume", "ls", "--quiet"),
            "networks": ("network", "ls", "--quiet"),
        }
        return {what: self._engine.docker(*listing, "--filter", label).split() for what, listing in listings.items()}


def free_ports(count: int) -> list[int]:
    """Returns free ports of loopback. All are bound before the first is released, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]

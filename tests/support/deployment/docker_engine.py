"""Docker engine for tests, and images that a host builds without a registry.

The engine has its own data, socket, process and mount namespace. If `dockerd` cannot be started, `obstacle` returns the
reason.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.waiting import wait_until

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "e2e"
DOCKERFILE = ROOT / "Dockerfile"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

# Each program, by the package of Debian that has it.
_PROGRAMS = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
# Where an engine writes whatever its options say.
_FIXED = (Path("/etc/docker"), Path("/run/docker"), Path("/run/containerd"), Path("/opt/containerd"))
_TABLES = ("filter", "nat")
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_DEBIAN = "e2e-debian"
# What of a firewall's rules is an engine's: its chains, and those that name a bridge of its.
_OF_ENGINES = re.compile(r"\bDOCKER\b|\bDOCKER-|\bbr-[0-9a-f]{12}\b")


def obstacle() -> str:
    """Returns why no engine can be started here, and what to do; empty if one can be started."""
    if os.geteuid() != 0:
        return "an engine of its own needs root: sudo make e2e"
    missing = sorted({package for program, package in _PROGRAMS.items() if not shutil.which(program)})
    if missing:
        return f"programs are missing: apt-get install {' '.join(missing)} (Debian's packages)"
    if "DOCKER" in _firewall("filter"):
        return "another Docker engine runs here, or left its firewall's rules; two would share them: stop it first"
    return ""


class Engine:
    """A `dockerd` that runs inside the `with` block. Its firewall rules, mounts and folders are removed at the end."""

    def __init__(self) -> None:
        # Short: the path of a socket in it may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{self.folder / 'socket'}",
            "DOCKER_CONFIG": str(self.folder / "client"),
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }
        self._rules = {table: _rules(table) for table in _TABLES}
        self._forwarding = _FORWARDING.read_text()
        self._made: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Engine":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process and self._process.poll() is None:
                self._remove_containers()
        finally:
            if self._process:
                self._process.terminate()
                self._process.wait(60)
            self._restore_firewall()
            _FORWARDING.write_text(self._forwarding)
            for folder in self._made:
                folder.rmdir()
            shutil.rmtree(self.folder)

    def docker(self, *arguments: str, errors: bool = False) -> str:
        """Returns the output of `docker ARGUMENTS`, with standard error if asked. Raises RuntimeError if it fails."""
        return run(["docker", *arguments], self.environment, errors=errors)

    def _start(self) -> None:
        for folder in _FIXED:
            if not folder.exists():
                folder.mkdir()
                self._made.append(folder)
        options = {
            "--data-root": self.folder / "data",
            "--exec-root": self.folder / "exec",
            "--pidfile": self.folder / "pid",
            "--config-file": self.folder / "daemon.json",
            "--host": self.environment["DOCKER_HOST"],
            "--bridge": "none",  # Compose makes one for each project, and builds use the host's network
        }
        (self.folder / "daemon.json").write_text("{}")
        hide = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in _FIXED)
        command = shlex.join(["dockerd", *(str(part) for option in options.items() for part in option)])
        log = self.folder / "log"
        with log.open("wb") as file:
            # The shell becomes the engine, so that its process is ours. Its mounts are gone when it is.
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", f"{hide} && exec {command}"], stdout=file, stderr=subprocess.STDOUT
            )
        wait_until(self._answers, timeout_s=60, what=f"the engine; its log ended with\n{_tail(log)}\nand its start")

    def _remove_containers(self) -> None:
        """Removes the containers that a failed test left, because they would outlive the engine."""
        if containers := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *containers)

    def _answers(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            raise RuntimeError(f"dockerd ended with {self._process.returncode}:\n{_tail(self.folder / 'log')}")
        found = subprocess.run(["docker", "version"], env=self.environment, capture_output=True, check=False)
        return found.returncode == 0

    def _restore_firewall(self) -> None:
        """Removes the firewall rules that an engine has added since the start."""
        for table, before in self._rules.items():
            new = [rule for rule in _rules(table) if rule not in before]
            ours = [shlex.split(rule) for rule in new if _OF_ENGINES.search(rule)]
            for rule in (rule for rule in ours if rule[0] == "-A"):
                _iptables(table, "-D", *rule[1:])
            for rule in (rule for rule in ours if rule[0] == "-N"):
                _iptables(table, "-X", rule[1])
            for rule in (shlex.split(rule) for rule in before if rule.startswith("-P")):
                _iptables(table, *rule)


def run(command: Sequence[str], environment: Mapping[str, str], *, errors: bool = False) -> str:
    """Returns a command's standard output, with standard error if asked. Raises RuntimeError if it fails."""
    done = subprocess.run(command, env=dict(environment), capture_output=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")[-8000:]
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{said}")
    return (done.stdout + (done.stderr if errors else b"")).decode(errors="replace")


def base_of(dockerfile: Path = DOCKERFILE) -> str:
    """Returns the default base image of the Dockerfile."""
    found = re.search(r"^ARG BASE=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    assert found, f"{dockerfile} has no ARG BASE"
    return found.group(1)


def import_base(engine: Engine) -> None:
    """Builds an image under the name of the Dockerfile's base: Debian with Python and this host's access to packages.

    Debian is fetched once and kept in build/e2e. The host's certificates, its pip configuration files and its PIP_*
    variables are added each time, to the image and never to the Dockerfile.
    """
    engine.docker("import", str(_debian()), _DEBIAN)
    folder = engine.folder / "base"
    for path in [CERTIFICATES, *_pip_files()]:
        copy = folder / "files" / path.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    variables = [f'ENV {name}="{value}"' for name, value in os.environ.items() if name.startswith("PIP_")]
    _build(engine, folder, base_of(), [f"FROM {_DEBIAN}", "COPY files /", *variables])


def import_prometheus(engine: Engine, name: str) -> None:
    """Builds an image of this host's Prometheus under a name. It is used like Prometheus's own image."""
    folder = engine.folder / "prometheus"
    folder.mkdir()
    for program in ("prometheus", "promtool"):
        found = shutil.which(program)
        assert found
        shutil.copy(found, folder)
    lines = [
        f"FROM {base_of()}",
        "COPY prometheus promtool /bin/",
        "RUN mkdir /prometheus && chown 65534:65534 /prometheus",
        "USER 65534",
        "WORKDIR /prometheus",
        'ENTRYPOINT ["/bin/prometheus"]',
    ]
    _build(engine, folder, name, lines)


def _build(engine: Engine, folder: Path, name: str, lines: list[str]) -> None:
    """Builds an image of a folder's contents, and removes the folder."""
    (folder / "Dockerfile").write_text("\n".join([*lines, ""]))
    engine.docker("build", "--tag", name, str(folder))
    shutil.rmtree(folder)


def _debian() -> Path:
    archive = CACHE / "base.tar"
    if archive.exists():
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="e2e-base-") as folder:
        packages = "python3,python3-venv,ca-certificates"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder]
        run(command, os.environ)
        unfinished = archive.with_suffix(".part")
        leave_out = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
        run(["tar", "--create", "--file", str(unfinished), *leave_out, "--directory", folder, "."], os.environ)
        unfinished.rename(archive)
    return archive


def _pip_files() -> list[Path]:
    """Returns the pip configuration files that this host has, and the files that they name, such as constraints."""
    said = run([sys.executable, "-m", "pip", "config", "debug"], os.environ)
    named = re.findall(r"^ +(/\S+), exists: True$|^ +global\.\S+: (/\S+)$", said, re.MULTILINE)
    paths = {Path(own or other) for own, other in named}
    return sorted(path for path in paths if path.is_file())


def _rules(table: str) -> list[str]:
    return _firewall(table).splitlines()


def _firewall(table: str) -> str:
    return run(["iptables", "--table", table, "--list-rules"], os.environ)


def _iptables(table: str, *arguments: str) -> None:
    run(["iptables", "--table", table, *arguments], os.environ)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""

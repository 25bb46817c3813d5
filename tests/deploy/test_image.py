"""Checks of the Dockerfile and of the files that it copies, as far as they work without an engine."""

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.deployment import docker_engine
from support.deployment.dockerfile import stages

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy" / "image"
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = {stage.name: stage for stage in stages(TEXT)}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def argument(stage: str, name: str) -> str:
    return next(value.partition("=")[2] for value in STAGES[stage].of("ARG") if value.split("=")[0] == name)


def test_without_a_target_the_image_is_the_cpus() -> None:
    last = stages(TEXT)[-1]
    assert (last.base, last.instructions) == ("shoal", [])


class TestFinalStage:
    stage = STAGES["shoal"]

    def test_it_runs_as_a_user_with_a_number(self) -> None:
        # Only of a number does Kubernetes know that it is not root's (runAsNonRoot).
        assert self.stage.of("USER") == ["65532:65532"]

    def test_it_has_nothing_that_builds(self) -> None:
        assert [line for line in self.stage.of("RUN") if re.search(r"\b(apt-get|pip|gcc|venv)\b", line)] == []
        assert self.stage.of("COPY") == ["--from=build /opt/shoal /opt/shoal"]

    def test_the_role_is_the_command(self) -> None:
        assert [json.loads(line) for line in self.stage.of("ENTRYPOINT")] == [["shoal"]]

    def test_its_version_is_the_projects(self) -> None:
        assert argument("shoal", "VERSION") == project()["version"]

    def test_its_health_is_asked_of_a_script_that_it_has(self) -> None:
        [check] = self.stage.of("HEALTHCHECK")
        *_, script = json.loads(check[check.index("[") :])
        copied = [line.split() for line in STAGES["build"].of("COPY")]
        [source] = [source for source, *_, target in copied if target == script]
        assert (ROOT / source).is_file()

    def test_the_gpus_adds_to_it_only_a_check_of_its_base(self) -> None:
        gpu = STAGES["gpu"]
        assert gpu.base == "shoal"
        [(keyword, check)] = gpu.instructions
        assert keyword == "RUN"

        def ends(cuda: Mapping[str, str]) -> tuple[int, bool]:
            done = subprocess.run(["sh", "-c", check], env=cuda, capture_output=True, text=True, check=False)
            return done.returncode, "--build-arg BASE=nvidia/cuda" in done.stderr

        assert ends({"CUDA_VERSION": "12.6.3"}) == (0, False)
        assert ends({}) == (2, True)


def test_no_builder_but_any_is_asked_for() -> None:
    # Debian's Docker has none of BuildKit's: no syntax line, no heredoc, no --mount, --chmod or --link.
    assert not re.search(r"^# *syntax *=|<<|--(mount|chmod|link|security|network)\b", TEXT, re.MULTILINE)


def test_what_is_copied_gets_in_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copies = [line.split()[:-1] for stage in STAGES.values() for line in stage.of("COPY") if "--from" not in line]
    wanted = {source for sources in copies for source in sources}
    assert "*" in ignored
    assert {source for source in wanted if not any(Path(source).is_relative_to(path) for path in let_in)} == set()
    assert {path for path in let_in if not any(Path(source).is_relative_to(path) for source in wanted)} == set()
    assert [path for path in let_in if not (ROOT / path).exists()] == []


def test_all_that_the_wheel_is_built_from_is_copied() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    wheel = hatch["build"]["targets"]["wheel"]
    hooks = [part["hooks"]["custom"]["path"] for part in (hatch["metadata"], hatch["build"])]
    copied = {source for line in STAGES["build"].of("COPY") for source in line.split()[:-1]}
    needed = [*wheel["packages"], *wheel["force-include"], *hooks]
    assert [path for path in needed if not any(Path(path).is_relative_to(source) for source in copied)] == []


def test_its_base_can_be_pinned_by_a_digest() -> None:
    assert argument_of_the_file("BASE") == docker_engine.base_of()
    bases = [stage.base for stage in stages(TEXT)]
    assert bases[0] == "${BASE}"
    assert set(bases[1:]) <= set(STAGES)
    assert "--build-arg BASE=python:3.11-slim-bookworm@sha256:" in TEXT


def argument_of_the_file(name: str) -> str:
    [value] = re.findall(rf"^ARG {name}=(\S+)$", TEXT.partition("FROM")[0], re.MULTILINE)
    return str(value)


def test_its_extras_are_locked() -> None:
    extras = argument("build", "EXTRAS").split(",")
    assert set(extras) <= set(project()["optional-dependencies"])
    assert [extra for extra in extras if not (ROOT / "requirements" / f"{extra}.txt").is_file()] == []


def installed(folder: Path, cuda: Mapping[str, str], extras: str = "data") -> tuple[int, str, list[str]]:
    """Runs install.sh with fake programs. Returns its exit status, its errors, and the arguments of pip's calls."""
    for name in ("deploy", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / "bin"
    programs.mkdir()
    script = (IMAGE / "install.sh").read_text().replace("/opt/build/bin/python3", "python_of_build")
    (programs / "install.sh").write_text(script.replace("/tmp/cuda-headers.txt", f"{folder}/cuda-headers.txt"))
    (programs / "python_of_build").write_text(
        f'#!/bin/sh\nprintf "%s " "$@" >> {folder}/calls\necho >> {folder}/calls\n'
    )
    (programs / "python3").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o700)
    done = subprocess.run(
        ["sh", programs / "install.sh", "dependencies", extras],
        env={"PATH": f"{programs}:/usr/bin:/bin", **cuda},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    calls = folder / "calls"
    return done.returncode, done.stderr, calls.read_text().splitlines() if calls.exists() else []


def locked(call: str) -> list[str]:
    """Returns the requirements files of a call of pip."""
    return re.findall(r"--requirement (\S+)", call)


class TestInstall:
    def test_every_package_is_checked_by_its_hash(self, tmp_path: Path) -> None:
        code, complaint, calls = installed(tmp_path, {})
        assert (code, complaint) == (0, "")
        assert all("--require-hashes" in call for call in calls)
        assert [locked(call) for call in calls] == [
            ["requirements/build.txt", "requirements/sbom.txt"],
            ["requirements/base.txt", "requirements/data.txt"],  # and no CuPy: there is no CUDA
        ]
        assert "--python /opt/shoal/bin/python3" in calls[1]

    @pytest.mark.parametrize(
        ("cuda", "extra", "headers"),
        [
            ("12.6.3", "gpu", "nvidia-cuda-runtime-cu12==12.6."),
            ("13.0.1", "gpu13", "nvidia-cuda-runtime==13.0."),
        ],
    )
    def test_with_cuda_there_is_what_its_version_wants(
        self, tmp_path: Path, cuda: str, extra: str, headers: str
    ) -> None:
        code, complaint, calls = installed(tmp_path, {"CUDA_VERSION": cuda})
        assert (code, complaint) == (0, "")
        assert locked(calls[1])[2:] == [f"requirements/{extra}.txt", f"{tmp_path}/cuda-headers.txt"]
        [line] = (tmp_path / "cuda-headers.txt").read_text().splitlines()
        assert line.startswith(headers)
        assert "--hash=sha256:" in line

    def test_a_version_of_cuda_that_there_is_no_cupy_for(self, tmp_path: Path) -> None:
        code, complaint, calls = installed(tmp_path, {"CUDA_VERSION": "11.8.0"})
        assert (code, calls) == (2, [])
        assert "CUDA_VERSION, which the base sets, is 11.8.0" in complaint

    def test_a_version_of_cuda_without_locked_headers(self, tmp_path: Path) -> None:
        code, complaint, calls = installed(tmp_path, {"CUDA_VERSION": "12.7.1"})
        assert (code, calls) == (2, [])
        assert "cuda-headers.txt has no headers for CUDA_VERSION 12.7.1" in complaint

    def test_an_extra_that_there_is_not_ends_the_build(self, tmp_path: Path) -> None:
        code, complaint, calls = installed(tmp_path, {}, "data,nonesuch")
        assert (code, calls) == (2, [])
        assert "EXTRAS has 'nonesuch', but there is no requirements/nonesuch.txt" in complaint


@contextmanager
def metrics_server(status: int, body: bytes) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/healthz"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: str) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def health(listen: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", IMAGE / "health.py"],
        env={"SHOAL_METRICS_LISTEN": listen},
        capture_output=True,
        text=True,
        check=False,
    )


class TestHealth:
    @pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", ""])
    def test_a_role_that_is_well(self, host: str) -> None:
        with metrics_server(200, b"ok") as port:
            done = health(f"{host}:{port}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_role_that_is_not_says_why(self) -> None:
        with metrics_server(503, b"no coordinator at coordinator:7070") as port:
            done = health(f"0.0.0.0:{port}")
        assert (done.returncode, done.stdout) == (1, "no coordinator at coordinator:7070\n")

    def test_nobody_there(self) -> None:
        with metrics_server(200, b"") as port:
            pass
        done = health(f"0.0.0.0:{port}")
        assert done.returncode == 1
        assert f"SHOAL_METRICS_LISTEN=0.0.0.0:{port}" in done.stdout

    def test_no_address(self) -> None:
        done = health("")
        assert done.returncode == 1
        assert "SHOAL_METRICS_LISTEN" in done.stdout

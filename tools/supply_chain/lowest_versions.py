"""An environment with the lowest versions that pyproject.toml declares, for `make test-lowest`.

The packages that Shoal itself needs, with its extras for data, storage and drawing, have their lowest versions. The
packages that only the tests need have the newest versions that fit. It needs a network.
"""

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

import lock_files
from packaging.requirements import Requirement
from renew_locks import UV, settings_of_pip

# The extras that the tests use. The others need a GPU, or are tools.
_EXTRAS = ("data", "demo", "images", "keras", "otel", "s3", "tensorboard")
# Packages of the extra `dev` that the tests import. The others check the code, and some need newer versions.
_TEST_TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "safetensors", "moto", "flask", "flask-cors"),
    *("httpx", "kubernetes-validate", "kubeflow-trainer-api", "jsonschema", "promql-parser", "pyyaml", "packaging"),
    "grpcio-tools",
)


def install(folder: Path) -> None:
    """Creates the environment.

    Args:
        folder: where it is created; an environment that is there is replaced.
    """
    project = tomllib.loads((lock_files.ROOT / "pyproject.toml").read_text())
    developers = map(Requirement, project["project"]["optional-dependencies"]["dev"])
    tools = [str(each) for each in developers if each.name in _TEST_TOOLS]
    own = f".[{','.join(_EXTRAS)}]"
    constraints = folder.with_name(f"{folder.name}.txt")
    extras = [option for extra in _EXTRAS for option in ("--extra", extra)]
    python = str(folder / "bin" / "python")
    _uv("venv", "--clear", "--python", sys.executable, str(folder))
    _uv("pip", "compile", "pyproject.toml", *extras, "--resolution", "lowest-direct", "--output-file", str(constraints))
    _uv("pip", "install", "--python", python, "--constraint", str(constraints), *tools, "--editable", own)


def _uv(*arguments: str) -> None:
    command = [str(UV), *arguments, "--quiet"]
    done = subprocess.run(command, cwd=lock_files.ROOT, env=settings_of_pip(), check=False)
    if done.returncode:
        sys.exit(f"`uv {' '.join(arguments)}` failed; it needs a network, and its reason is above")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Installs the lowest versions that pyproject.toml declares.")
    parser.add_argument("folder", type=Path, help="folder of the environment")
    install(parser.parse_args().folder.absolute())


if __name__ == "__main__":
    main()

"""Public names of `import shoal`, and the modules that the import loads."""

import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

import shoal

# What a client needs none of: it would wait for it at every import.
HEAVY = {
    "numba",
    "llvmlite",
    "typer",
    "matplotlib",
    "scipy",
    "cupy",
    "torch",
    "jax",
    "flax",
    "keras",
    "tensorflow",
    "transformers",
    "prometheus_client",
    "pyarrow",
    "fsspec",
    "PIL",
    "tensorboardX",
}
ROLES = {"shoal_server", "shoal_coordinator", "shoal_worker", "shoal_nn"}


def modules_after(statement: str) -> set[str]:
    """The top-level modules of a fresh interpreter after a statement."""
    code = (
        f"{statement}; import sys, json; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def test_every_name_in_all_exists_once() -> None:
    assert sorted(shoal.__all__) == sorted(set(shoal.__all__))
    for name in shoal.__all__:
        assert hasattr(shoal, name), name


def test_nothing_public_is_missing_from_all() -> None:
    assert shoal.Client.__name__ == "Client"  # importing it imports its dependencies
    submodules = {name for name in vars(shoal) if f"shoal.{name}" in sys.modules}
    public = {name for name in vars(shoal) if not name.startswith("_")} - submodules
    assert public <= set(shoal.__all__)


@pytest.mark.parametrize(
    "name",
    ["Client", "JobHandle", "LocalCluster", "Session", "Job", "Variable", "StepOutput", "Synchronous", "connect"],
)
def test_public_class_has_a_docstring(name: str) -> None:
    assert len(getattr(shoal, name).__doc__ or "") > 40


def test_errors_for_users_are_exported() -> None:
    # Between clients and servers, or of those who run a cluster; users see none.
    ours = {
        "BadChunk",
        "BadFrame",
        "BadRequest",
        "Forbidden",
        "Moved",
        "NotStaged",
        "Unauthenticated",
        "UnequalKernels",
    }
    ours |= {"UnknownShard", "StoreFailed", "StoreLocked", "StoreUnreadable", "SecretRefused"}
    for name in set(shoal.errors.__all__) - ours:
        assert getattr(shoal, name) is getattr(shoal.errors, name)
        assert name in shoal.__all__


def test_no_type_of_the_wire_is_public() -> None:
    for name in shoal.__all__:
        module = getattr(getattr(shoal, name), "__module__", "")
        assert not module.startswith(("grpc", "google", "shoal.v1")), name


def test_the_version_is_the_distribution_s() -> None:
    assert shoal.__version__ == version("shoal")


def test_import_loads_dependencies_on_first_use() -> None:
    assert modules_after("import shoal") & {"grpc", "google", "numpy", "ml_dtypes"} == set()
    assert modules_after("from shoal import *") >= {"grpc", "numpy"}


def test_the_bare_import_loads_no_other_module() -> None:
    code = "import sys; before = {*sys.modules}; import shoal; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["shoal"]


def test_only_servers_load_kernels() -> None:
    others = "shoal_coordinator.process, shoal_worker.process, shoal_worker.trainer, shoal_nn, shoal_server.main"
    assert modules_after(f"import {others}") & {"numba", "llvmlite"} == set()
    assert modules_after("import shoal_server.process") >= {"numba", "llvmlite"}


def test_missing_name_raises_attribute_error() -> None:
    assert set(shoal.__all__) <= set(dir(shoal))
    module: Any = shoal
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'Sessions'"):
        _ = module.Sessions


def test_using_the_client_imports_no_role_and_no_heavy_package() -> None:
    assert modules_after("from shoal import *") & (HEAVY | ROLES) == set()


def test_the_command_line_brings_no_role_either() -> None:
    assert modules_after("import shoal._cli.app") & (ROLES | HEAVY - {"typer"}) == set()

"""What `import shoal` gives, and what it costs."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import shoal

# What a client needs none of: it would wait for it at every import.
HEAVY = {
    "numba",
    "llvmlite",
    "typer",
    "matplotlib",
    "sklearn",
    "scipy",
    "cupy",
    "torch",
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


def test_all_names_what_is_there_and_only_that():
    assert sorted(shoal.__all__) == sorted(set(shoal.__all__))
    for name in shoal.__all__:
        assert hasattr(shoal, name), name


def test_nothing_public_is_missing_from_all():
    assert shoal.Client  # with what it needs
    submodules = {name for name in vars(shoal) if f"shoal.{name}" in sys.modules}
    public = {name for name in vars(shoal) if not name.startswith("_")} - submodules
    assert public <= set(shoal.__all__)


@pytest.mark.parametrize(
    "name",
    ["Client", "JobHandle", "LocalCluster", "Session", "Job", "Variable", "StepOutput", "Synchronous", "connect"],
)
def test_what_users_touch_says_what_it_is(name):
    assert len(getattr(shoal, name).__doc__ or "") > 40


def test_the_errors_that_users_catch_are_at_hand():
    # Between clients and servers, or of those who run a cluster; users see none.
    ours = {"BadChunk", "BadFrame", "BadRequest", "Forbidden", "NotStaged", "Unauthenticated", "UnknownShard"}
    ours |= {"StoreFailed", "StoreLocked", "StoreUnreadable"}
    for name in set(shoal.errors.__all__) - ours:
        assert getattr(shoal, name) is getattr(shoal.errors, name)
        assert name in shoal.__all__


def test_no_type_of_the_wire_is_public():
    for name in shoal.__all__:
        module = getattr(getattr(shoal, name), "__module__", "")
        assert not module.startswith(("grpc", "google", "shoal.v1")), name


def test_the_version_is_the_distribution_s():
    assert shoal.__version__ == version("shoal")


def test_importing_loads_nothing_before_it_is_used():
    assert modules_after("import shoal") & {"grpc", "google", "numpy", "ml_dtypes"} == set()
    assert modules_after("from shoal import *") >= {"grpc", "numpy"}


def test_what_is_not_there_is_missed_as_from_any_module():
    assert set(shoal.__all__) <= set(dir(shoal))
    with pytest.raises(AttributeError, match="module 'shoal' has no attribute 'Sessions'"):
        _ = shoal.Sessions


def test_using_it_is_light_and_brings_no_role():
    assert modules_after("from shoal import *") & (HEAVY | ROLES) == set()


def test_the_command_line_brings_no_role_either():
    assert modules_after("import shoal._cli.app") & (ROLES | HEAVY - {"typer"}) == set()

"""Import rules beyond the contracts in pyproject.toml: modules named in strings, and modules loaded too early."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = {
    "shoal": ROOT / "client",
    "shoal_server": ROOT / "server",
    "shoal_coordinator": ROOT / "server",
    "shoal_worker": ROOT / "worker",
    "shoal_nn": ROOT / "worker",
    "shoal_distribute": ROOT / "worker",
}
# Of shoal_nn: kernels for the host alone, programs, which look at a data set there, and readers of weights. And sums
# that have a module for the host and one for a GPU.
HOST_ONLY = {"affine_maps.py", "depthwise.py", "programs.py", "files.py", "loading.py", "naming.py", "state_dicts.py"}
HOST_ONLY |= {"channels.py", "channels_on_gpu.py"}
MODULES = [(room, path) for room, folder in ROOMS.items() for path in sorted((folder / room).rglob("*.py"))]


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def mentions(path: Path, names: set[str]) -> bool:
    """Whether a file has one of these names anywhere. Only such files are parsed, which takes longer."""
    return any(name in text(path) for name in names)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(path: Path) -> set[str]:
    """The packages that a file imports."""
    return {name.partition(".")[0] for name in imports(path)}


def named_in_strings(path: Path) -> set[str]:
    """The packages that a file's strings may name, for importlib and sys.modules: strings that are a dotted name."""
    constants = (node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant))
    return {
        value.partition(".")[0]
        for value in constants
        if isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
    }


def where(packages: set[str], *, strings: bool = False) -> set[str]:
    """The modules, of all rooms, that import one of these packages, or name one in a string."""
    return {
        path.relative_to(ROOT).as_posix()
        for _, path in MODULES
        if mentions(path, packages) and packages & (tops(path) | (named_in_strings(path) if strings else set()))
    }


def test_one_module_imports_cupy() -> None:
    assert where({"cupy", "cupyx", "cupy_backends"}, strings=True) == {"worker/shoal_worker/arrays.py"}


def test_one_package_imports_opentelemetry() -> None:
    found = where({"opentelemetry"}, strings=True)
    assert found == {"client/shoal/_tracing/process.py", "client/shoal/_tracing/spans.py"}


def test_layers_compute_through_the_namespace_of_their_arrays() -> None:
    used = {
        node.attr
        for room, path in MODULES
        if room == "shoal_nn" and path.name not in HOST_ONLY
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "np"
    }
    # Dtypes, what makes first values, which begin on the host, and NumPy's own warnings.
    assert used <= {"dtype", "float16", "float32", "float64", "ndarray", "random", "empty", "errstate"}


def test_nothing_imports_cupy_opentelemetry_or_a_framework_before_it_is_asked_for() -> None:
    """The test imports every module of ours in a process of its own, whatever is installed, but those of adapters."""
    names = [path.relative_to(ROOMS[room]).with_suffix("").as_posix().replace("/", ".") for room, path in MODULES]
    ours = [
        name.removesuffix(".__init__")
        for name in names
        if not name.endswith("__main__")
        and not name.startswith(("shoal.jax", "shoal.keras", "shoal.ray", "shoal.torch", "shoal.transformers"))
    ]
    script = f"import importlib, sys; [importlib.import_module(name) for name in {ours!r}]; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert ROOMS.keys() & loaded >= {"shoal", "shoal_server", "shoal_coordinator", "shoal_worker", "shoal_nn"}
    assert not loaded & {"cupy", "cupyx", "cupy_backends", "cudnn", "opentelemetry"}
    assert not loaded & {"torch", "jax", "flax", "optax", "keras", "tensorflow", "transformers", "accelerate", "ray"}


def test_no_pickle() -> None:
    assert not where({"pickle", "cloudpickle", "dill", "marshal", "shelve"}, strings=True)


def test_the_scan_sees_all_rooms() -> None:
    seen = {room for room, _ in MODULES}
    assert seen >= {"shoal", "shoal_server", "shoal_coordinator", "shoal_worker", "shoal_nn"}
    assert seen == {room for room, folder in ROOMS.items() if (folder / room).is_dir()}
    packages = {
        path.parent.name for folder in ("client", "server", "worker") for path in (ROOT / folder).glob("*/__init__.py")
    }
    assert packages <= ROOMS.keys(), "a room that the scan does not know"


def test_only_the_loader_of_programs_imports_what_a_job_names() -> None:
    """Each other module imports by names of its own: a literal, or those of a parameter that a literal is given."""
    importers = {"import_module", "_import_module", "__import__", "find_spec", "resolve_name", "locate", "eval", "exec"}
    found = set()
    for path in (path for _, path in MODULES if mentions(path, importers)):
        for call in (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and node.args):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in importers and not isinstance(call.args[0], ast.Constant):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {
        "client/shoal/__init__.py",  # the lazy public names
        "client/shoal/_system/optional.py",  # optional packages, by literals of its callers
        "client/shoal/_tracing/process.py",  # whether a package of OpenTelemetry is installed
        "worker/shoal_worker/allowed_programs.py",  # PathFinder, which imports nothing
        "worker/shoal_worker/programs.py",  # after `AllowedPrograms.check`
    }

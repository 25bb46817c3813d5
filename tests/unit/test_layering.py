"""Who imports whom, read from the imports themselves: `shoal` knows no role, and no role knows another."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "shoal": ROOT / "client",
    "shoal_server": ROOT / "server",
    "shoal_coordinator": ROOT / "server",
    "shoal_worker": ROOT / "worker",
    "shoal_nn": ROOT / "worker",
    "shoal_distribute": ROOT / "worker",
}
# Beside itself and what is not ours.
MAY_IMPORT = {
    "shoal": set(),
    "shoal_server": {"shoal"},
    "shoal_coordinator": {"shoal"},
    "shoal_worker": {"shoal"},
    "shoal_nn": set(),
    "shoal_distribute": {"shoal"},
}
FOLDERS = {"client", "server", "worker"}
FILES = [
    pytest.param(room, path, id=str(path.relative_to(ROOT)))
    for room, folder in ROOMS.items()
    for path in sorted((folder / room).rglob("*.py"))
]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("room", "path"), FILES)
def test_a_module_imports_only_what_its_room_may(room, path):
    tops = {name.partition(".")[0] for name in imports(path)}
    assert tops & ROOMS.keys() <= MAY_IMPORT[room] | {room}
    assert not tops & FOLDERS, "a folder's name is no package"


def test_one_module_imports_cupy():
    importing = {
        path for _, path in (p.values for p in FILES) if "cupy" in {n.partition(".")[0] for n in imports(path)}
    }
    assert importing <= {ROOT / "worker/shoal_worker/arrays.py"}


def test_grpc_stops_at_the_edge_of_what_users_import():
    edge = {"_rpc.py", "_parameters.py", "v1"}
    importing = {
        path.relative_to(ROOT / "client/shoal")
        for room, path in (p.values for p in FILES)
        if room == "shoal" and "grpc" in {name.partition(".")[0] for name in imports(path)}
    }
    assert {path.parts[0] for path in importing} <= edge


def test_no_pickle():
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for _, path in (p.values for p in FILES):
        assert not {name.partition(".")[0] for name in imports(path)} & unsafe, path


def test_the_scan_sees_the_rooms():
    assert {room for room, _ in (p.values for p in FILES)} >= {"shoal", "shoal_server", "shoal_coordinator"}

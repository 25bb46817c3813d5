"""Leftovers of clusters on Ray on this machine: private folders, processes, and resources of Ray."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import wait_until


def our_files() -> list[str]:
    """Returns the private folders of clusters on Ray, which have random numbers in their names."""
    names = [it.name for it in Path(tempfile.gettempdir()).glob("shoal-*")]
    return sorted(name for name in names if re.fullmatch(r"shoal-[0-9a-f]{16}-.*", name))


def alive(pid: int) -> bool:
    """Returns whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watch_for_leftovers(ray: Any, cluster: str) -> Callable[[Any], Callable[[], None]]:
    """Notes what there is before a cluster starts.

    Args:
        ray: the module, connected.
        cluster: name of the cluster.

    Returns:
        A function for the running cluster. It returns a function that raises AssertionError if the cluster, which has
        ended then, has left anything.
    """
    files, groups, free = our_files(), _groups(ray), ray.available_resources()["CPU"]

    def note(running: Any) -> Callable[[], None]:
        pids = [pid for name in running.actors for pid in _pids(running.report(name))]
        (label,) = re.findall(r"shoal-[0-9a-f]{16}-", running.variables["SHOAL_TLS_CA"])

        def check() -> None:
            wait_until(lambda: not any(map(alive, pids)), what="the end of the actors and roles")
            wait_until(lambda: not _naming(label), what="the end of all processes that name the cluster's folders")
            assert our_files() == files
            names = [it["name"] for it in ray.util.list_named_actors(all_namespaces=True)]
            assert not [name for name in names if name.startswith(f"{cluster}:")]
            assert _groups(ray) <= groups
            wait_until(lambda: ray.available_resources()["CPU"] > free - 1e-6, what="the free resources")

        return check

    return note


def _pids(report: dict[str, Any]) -> tuple[int, int]:
    return report["pid"], report["actor"]


def _groups(ray: Any) -> set[str]:
    """Returns the placement groups that exist."""
    return {name for name, found in ray.util.placement_group_table().items() if found["state"] != "REMOVED"}


def _naming(text: str) -> list[int]:
    """Returns the processes whose command lines have a text."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found

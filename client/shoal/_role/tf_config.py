"""`TF_CONFIG`, by which TensorFlow tells a process its cluster and its task in it: read, checked, in our words. Pure.

The form is that of `tf.distribute.cluster_resolver.TFConfigClusterResolver`: lists of host:port by type of task, and
the type and index of this one. Other keys (`environment`, `rpc_layer`) say nothing that a role needs.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal import errors

VARIABLE = "TF_CONFIG"
# What each type of task is here. `master` is the old name of the chief.
_ROLES = {"chief": "coordinator", "master": "coordinator", "ps": "server", "worker": "worker"}
_EVALUATOR = "evaluator"
_LISTS = (*_ROLES, _EVALUATOR)
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_EXAMPLE = (
    '{"cluster": {"chief": ["a:7070"], "ps": ["b:7070", "c:7070"], "worker": ["d:7070"]}, '
    '"task": {"type": "ps", "index": 1}}'
)


@dataclass(frozen=True, slots=True)
class Task:
    """What `TF_CONFIG` says of this process.

    Attributes:
        type: of the task, as it is written there.
        index: of the task, among those of its type.
        role: what it is here: coordinator, server or worker.
        host: that others reach it by.
        port: that it is to listen on, 1 to 65535.
        coordinator: its host:port; empty where the cluster lists no chief.
    """

    type: str
    index: int
    role: str
    host: str
    port: int
    coordinator: str


def read(text: str) -> Task:
    """Reads the value of `TF_CONFIG`.

    Raises:
        BadRequest: it is not JSON, not of that form, lists an address twice, or has no such task; the message says.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is not JSON ({error}); give an object such as {_EXAMPLE}") from None
    if not isinstance(value, dict) or not isinstance(value.get("cluster"), dict):
        raise _bad(f"it is no object with an object `cluster`; give one such as {_EXAMPLE}")
    lists = {kind: _addresses(kind, listed) for kind, listed in value["cluster"].items()}
    _check_unique(lists)
    chiefs = [*lists.get("chief", []), *lists.get("master", [])]
    if len(chiefs) > 1:
        raise _bad(f"it lists {len(chiefs)} chiefs (or masters); Shoal has one coordinator, so list one")
    kind, index = _task(value.get("task"), lists)
    host, port = lists[kind][index]
    coordinator = ":".join(map(str, chiefs[0])) if chiefs else ""
    return Task(kind, index, _ROLES[kind], host, port, coordinator)


def _addresses(kind: str, listed: object) -> list[tuple[str, int]]:
    if kind not in _LISTS:
        raise _bad(f"cluster has {reprlib.repr(kind)}; it may list {', '.join(_LISTS)}")
    if not isinstance(listed, list) or not listed:
        raise _bad(f"cluster.{kind} is {reprlib.repr(listed)}; give a list of one address or more, or leave it out")
    return [_address(f"cluster.{kind}[{place}]", address) for place, address in enumerate(listed)]


def _address(where: str, text: object) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if not found or not 0 < int(found[2]) <= 65_535:
        raise _bad(f"{where} is {reprlib.repr(text)}; give host:port, such as ps-0.example:7070, with a port from 1 on")
    return found[1].lower(), int(found[2])


def _check_unique(lists: Mapping[str, list[tuple[str, int]]]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for kind, addresses in lists.items():
        for place, address in enumerate(addresses):
            where = f"cluster.{kind}[{place}]"
            if address in seen:
                raise _bad(
                    f"{seen[address]} and {where} are both {address[0]}:{address[1]}; "
                    "give each task an address of its own"
                )
            seen[address] = where


def _task(task: Any, lists: Mapping[str, list[tuple[str, int]]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        raise _bad(f'it has no object `task`; add one such as {{"type": "{next(iter(lists), "ps")}", "index": 0}}')
    kind = task.get("type")
    if kind == _EVALUATOR:
        raise _bad(
            "task.type is evaluator; in Shoal workers evaluate, as a job's --evaluate-every says: leave this task out"
        )
    if not isinstance(kind, str) or kind not in _ROLES:
        raise _bad(f"task.type is {reprlib.repr(kind)}; it is one of {', '.join(_ROLES)}")
    if kind not in lists:
        raise _bad(f"task.type is {kind}, and cluster lists no {kind}; add its address there")
    index = _index(task.get("index"))
    if not 0 <= index < len(lists[kind]):
        raise _bad(
            f"task.index is {reprlib.repr(index)}, and cluster.{kind} lists {len(lists[kind])}: "
            f"give 0 to {len(lists[kind]) - 1}, or list more"
        )
    return kind, index


def _index(index: object) -> int:
    """TensorFlow calls `int` on it, and there are launchers that write "0": so digits are one too."""
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        return int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        raise _bad(f"task.index is {reprlib.repr(index)}; give the task's place in its list, from 0 on")
    return index


def _bad(what: str) -> errors.BadRequest:
    return errors.BadRequest(f"{VARIABLE}: {what}", variable=VARIABLE)


__all__ = ["VARIABLE", "Task", "read"]

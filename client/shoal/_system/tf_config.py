"""Parser of `TF_CONFIG`, the variable that tells a TensorFlow process about its cluster and its task (no I/O).

The format is that of `tf.distribute.cluster_resolver.TFConfigClusterResolver`: lists of addresses by task type, and the
type and index of this task. Other keys (`environment`, `rpc_layer`) are ignored.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import errors

VARIABLE = "TF_CONFIG"
# The role of each task type. `master` is the old name of the chief.
_ROLES = {"chief": "coordinator", "master": "coordinator", "ps": "server", "worker": "worker"}
EVALUATOR = "evaluator"
TASK_TYPES = (*_ROLES, EVALUATOR)
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_EXAMPLE = (
    '{"cluster": {"chief": ["a:7070"], "ps": ["b:7070", "c:7070"], "worker": ["d:7070"]}, '
    '"task": {"type": "ps", "index": 1}}'
)


@dataclass(frozen=True, slots=True)
class TfConfig:
    """The content of `TF_CONFIG`.

    Attributes:
        cluster: host and port of each task, in order, by task type.
        task_type: type of this task.
        task_index: the task's place in the list of its type, from 0.
    """

    cluster: Mapping[str, Sequence[tuple[str, int]]]
    task_type: str
    task_index: int


@dataclass(frozen=True, slots=True)
class Task:
    """The task that `TF_CONFIG` gives this process, as a role of a cluster.

    Attributes:
        type: the task's type as written in `TF_CONFIG`.
        index: the task's place in the list of its type, from 0.
        role: coordinator, server or worker.
        host: host by which others reach the task.
        port: port to listen on, 1 to 65535.
        coordinator: host:port of the coordinator. Empty if the cluster lists no chief.
    """

    type: str
    index: int
    role: str
    host: str
    port: int
    coordinator: str


def read(text: str) -> Task:
    """Reads the value of `TF_CONFIG` for a role.

    Raises:
        BadRequest: as for `parse`; or the value lists several chiefs, or the task is no role.
    """
    config = parse(text)
    chiefs = [*config.cluster.get("chief", []), *config.cluster.get("master", [])]
    if len(chiefs) > 1:
        raise _bad(f"cluster lists {len(chiefs)} chiefs (or masters); Shoal has one coordinator, so list one")
    kind, index = config.task_type, config.task_index
    if kind == EVALUATOR:
        raise _bad("task.type is evaluator; workers evaluate a job (--evaluate-every-steps), so leave this task out")
    host, port = config.cluster[kind][index]
    coordinator = ":".join(map(str, chiefs[0])) if chiefs else ""
    return Task(kind, index, _ROLES[kind], host, port, coordinator)


def parse(text: str, *, default_port: int | None = None) -> TfConfig:
    """Reads the value of `TF_CONFIG`.

    Args:
        text: the value.
        default_port: port of the addresses without one. None means that each address must have one.

    Returns:
        The content.

    Raises:
        BadRequest: the value is not JSON, has another format, lists an address twice, or does not list the task.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"the value is not JSON ({error}); give an object such as {_EXAMPLE}") from None
    if not isinstance(value, dict) or not isinstance(value.get("cluster"), dict):
        raise _bad(f"the value has no object `cluster`; give an object such as {_EXAMPLE}")
    lists = {kind: _addresses(kind, listed, default_port) for kind, listed in value["cluster"].items()}
    _check_unique(lists)
    return TfConfig(lists, *_task(value.get("task"), lists))


def _addresses(kind: str, listed: object, default_port: int | None) -> list[tuple[str, int]]:
    if kind not in TASK_TYPES:
        raise _bad(f"cluster has the key {reprlib.repr(kind)}; use only {', '.join(TASK_TYPES)}")
    if not isinstance(listed, list) or not listed:
        raise _bad(f"cluster.{kind} is {reprlib.repr(listed)}; give a list of one or more addresses, or leave it out")
    return [_address(f"cluster.{kind}[{place}]", address, default_port) for place, address in enumerate(listed)]


def _address(where: str, text: object, default_port: int | None) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    port = int(found[2]) if found and found[2] else default_port
    if not found or port is None or not 0 < port <= 65_535:
        raise _bad(
            f"{where} is {reprlib.repr(text)}; give host:port, such as ps-0.example:7070, with a port from 1 to 65535"
        )
    return found[1].lower(), port


def _check_unique(lists: Mapping[str, list[tuple[str, int]]]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for kind, addresses in lists.items():
        for place, address in enumerate(addresses):
            where = f"cluster.{kind}[{place}]"
            if address in seen:
                raise _bad(
                    f"{seen[address]} and {where} are both {address[0]}:{address[1]}; give each task its own address"
                )
            seen[address] = where


def _task(task: Any, lists: Mapping[str, list[tuple[str, int]]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        raise _bad(
            f'the value has no object `task`; add one such as {{"type": "{next(iter(lists), "ps")}", "index": 0}}'
        )
    kind = task.get("type")
    if not isinstance(kind, str) or kind not in TASK_TYPES:
        raise _bad(f"task.type is {reprlib.repr(kind)}; use one of {', '.join(TASK_TYPES)}")
    if kind not in lists:
        raise _bad(f"task.type is {kind}, but cluster lists no {kind}; add its address to cluster.{kind}")
    index = _index(task.get("index"))
    if not 0 <= index < len(lists[kind]):
        raise _bad(
            f"task.index is {reprlib.repr(index)}, but cluster.{kind} lists {len(lists[kind])}; "
            f"give 0 to {len(lists[kind]) - 1}, or add addresses"
        )
    return kind, index


def _index(index: object) -> int:
    """Parses the index. Strings of digits are valid too, since TensorFlow calls `int` and some launchers write "0"."""
    if isinstance(index, str) and re.fullmatch(r"[0-9]{1,9}", index):
        return int(index)
    if not isinstance(index, int) or isinstance(index, bool):
        raise _bad(f"task.index is {reprlib.repr(index)}; give the task's place in its list, from 0")
    return index


def _bad(what: str) -> errors.BadRequest:
    return errors.BadRequest(f"{VARIABLE}: {what}", variable=VARIABLE)


__all__ = ["EVALUATOR", "TASK_TYPES", "VARIABLE", "Task", "TfConfig", "parse", "read"]

"""Resources of roles: what each role of a cluster asks an engine for, and what the nodes lack (no I/O)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal._system import check_type

# A coordinator, two servers and two workers fit on two cores, for experiments. Only workers compute, and for real
# training, users request the cores and GPUs that each of them uses.
DEFAULT_RESOURCES: Mapping[str, Mapping[str, float]] = {
    "coordinator": {"CPU": 0.1},
    "server": {"CPU": 0.4},
    "worker": {"CPU": 0.5},
}
_GIVE = "a dict such as {'worker': {'CPU': 4, 'GPU': 1}}"


@dataclass(frozen=True, slots=True)
class Request:
    """What one role needs. All of it must be on one node.

    Attributes:
        name: name of the role's process, such as "server-0".
        amounts: the amount of each resource, such as {"CPU": 4, "GPU": 1}.
    """

    name: str
    amounts: Mapping[str, float]


def check_resources(given: Any) -> dict[str, dict[str, float]]:
    """Returns the resources of each role: the given amounts, and the default amounts of resources that are not given.

    Args:
        given: the resources by role; None means the default ones. An amount of 0 removes a default one.

    Raises:
        BadRequest: a role is unknown, an amount is no positive number, or a role needs nothing.
    """
    check_type("resources", given, (Mapping, type(None)), _GIVE)
    found = {role: dict(amounts) for role, amounts in DEFAULT_RESOURCES.items()}
    for role, amounts in (given or {}).items():
        if role not in found:
            raise errors.BadRequest(f"resources has {role!r}; give {_GIVE}, with the keys {', '.join(found)}")
        check_type(f"resources[{role!r}]", amounts, Mapping, _GIVE)
        for resource, amount in amounts.items():
            if not isinstance(resource, str) or isinstance(amount, bool) or not isinstance(amount, int | float):
                raise errors.BadRequest(f"resources[{role!r}] has {resource!r}: {amount!r}; give {_GIVE}")
            if not 0 <= amount < float("inf"):
                raise errors.BadRequest(f"resources[{role!r}] has {amount!r} {resource}; give 0 or more")
        merged = {**found[role], **amounts}
        found[role] = {resource: float(amount) for resource, amount in merged.items() if amount}
        if not found[role]:
            raise errors.BadRequest(f"resources[{role!r}] asks for nothing; give at least {{'CPU': 0.1}}")
    return found


def requests(servers: int, workers: int, resources: Mapping[str, Mapping[str, float]]) -> list[Request]:
    """Returns the requests of a coordinator, servers and workers, in this order."""
    names = ["coordinator", *(f"server-{n}" for n in range(servers)), *(f"worker-{n}" for n in range(workers))]
    return [Request(name, resources[name.partition("-")[0]]) for name in names]


def shortage(wanted: Iterable[Request], nodes: Sequence[Mapping[str, float]]) -> str:
    """Returns what the nodes lack, as a sentence, or an empty string if they have enough.

    The nodes may still be too fragmented: the engine decides that when it places the processes.

    Args:
        wanted: the requests.
        nodes: the amount of each resource on each node.
    """
    wanted = list(wanted)
    needs, has = Counter[str](), Counter[str]()
    for request in wanted:
        needs.update(request.amounts)
    for node in nodes:
        has.update(node)
    # Sums of decimal fractions have errors of rounding.
    if lacking := [resource for resource in needs if needs[resource] > has[resource] + 1e-6]:
        each = [
            f"{_text(needs[it])} {it}, and there are {_text(has[it])} ({_text(needs[it] - has[it])} missing)"
            for it in lacking
        ]
        return f"the roles need {'; '.join(each)}"
    for request in wanted:
        if not any(all(node.get(it, 0) >= amount for it, amount in request.amounts.items()) for node in nodes):
            return f"no single node has {_texts(request.amounts)}, which {request.name} needs"
    return ""


def waiting(wanted: Iterable[Request], free: Mapping[str, float]) -> str:
    """Returns what requests wait for, and how much of it is free, as a sentence without its end.

    Args:
        wanted: the requests.
        free: the free amount of each resource on all nodes together.
    """
    wanted = list(wanted)
    resources = dict.fromkeys(resource for request in wanted for resource in request.amounts)
    needs = ", ".join(f"{request.name} needs {_texts(request.amounts)}" for request in wanted)
    return f"{needs}, {_texts({resource: free.get(resource, 0) for resource in resources})} are free"


def _texts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{_text(amount)} {resource}" for resource, amount in amounts.items())


def _text(amount: float) -> str:
    return f"{round(amount, 4):g}" if amount < 1e6 else f"{amount:,.0f}"


__all__ = ["DEFAULT_RESOURCES", "Request", "check_resources", "requests", "shortage", "waiting"]

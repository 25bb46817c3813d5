"""The text form of optimizers for the command line: `adam:learning_rate=0.01,schedule=cosine,steps=1000`."""

import dataclasses
from typing import Any

from shoal._job.settings import value
from shoal.errors import InvalidOptimizer
from shoal.optim._groups import VariableGroup
from shoal.optim._optimizers import Adam, Optimizer
from shoal.optim._plateau import ReduceOnPlateau
from shoal.optim._schedules import Schedule

SYNTAX = (
    "NAME or NAME:KEY=VALUE,KEY=VALUE, such as adamw:lr=0.001,schedule=cosine,steps=1000. NAME: "
    + ", ".join(sorted(Optimizer.registry))
    + ". KEY: an argument of the optimizer, or schedule=NAME and an argument of the schedule. The page "
    "'The command line' of the documentation has the whole syntax."
)

_GROUP_KEYS = ("rate", "weight_decay", "frozen")
_NUMBER_LISTS = ("betas", "boundaries", "rates")


def parse(text: str) -> Optimizer:
    """Parses the text form of an optimizer; `SYNTAX` describes it.

    Raises:
        InvalidOptimizer: a name or key is unknown, or a value is out of range.
    """
    name, _, rest = text.partition(":")
    kind = _known(Optimizer, name)
    values = _pairs(text, rest)
    groups = [_group(text, each) for each in values.pop("group", ())]
    if "lr" in values:
        if "learning_rate" in values:
            raise InvalidOptimizer(f"{text}: learning_rate and lr are both given, and mean the same; give only one")
        values["learning_rate"] = values.pop("lr")
    is_chosen = "schedule" in values
    schedule = _known(Schedule, str(values.pop("schedule", "constant")))
    if "decay_exclude" in values:
        values["decay_exclude"] = tuple(str(values["decay_exclude"]).split("|"))
    for key in values.keys() & set(_NUMBER_LISTS):
        values[key] = tuple(value(each) for each in str(values[key]).split("|"))
    rate = {key: values.pop(key) for key in _fields(schedule) if key in values}
    if unknown := values.keys() - (_fields(kind).keys() - {"groups"}) - _aliases(kind):
        of_schedule = (key for key in _fields(schedule) if key != "learning_rate")
        taken = [*(key for key in _fields(kind) if key != "groups"), "group", "schedule", *of_schedule]
        known = kind.advice | schedule.advice
        advice = [known[key] for key in sorted(unknown) if key in known]
        instead = "; ".join(advice) or f"with this schedule it takes {', '.join(taken)}"
        raise InvalidOptimizer(f"{name}: unknown {', '.join(sorted(unknown))}; {instead}")
    rate.setdefault("learning_rate", _fields(kind)["learning_rate"].default)
    missing = [key for key, field in _fields(schedule).items() if _required(field) and key not in rate]
    if missing:
        raise InvalidOptimizer(f"{text}: schedule={schedule.name} needs {', '.join(missing)}")
    schedule.checked(
        rate, schedule.name if is_chosen else name
    )  # a message does not name a schedule that the user did not write
    made: Optimizer = kind(learning_rate=schedule(**rate), groups=groups, **values)
    return made


def parse_plateau(text: str) -> ReduceOnPlateau:
    """Parses KEY=VALUE,KEY=VALUE: arguments of `ReduceOnPlateau`.

    Raises:
        InvalidOptimizer: a key is unknown, or a value is out of range.
    """
    values = _pairs(text, text)
    if unknown := values.keys() - _fields(ReduceOnPlateau):
        raise InvalidOptimizer(
            f"{text}: unknown {', '.join(sorted(unknown))}; the reduction takes {', '.join(_fields(ReduceOnPlateau))}"
        )
    return ReduceOnPlateau(**values)


def _pairs(text: str, rest: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, given = pair.partition("=")
        if not equals:
            raise InvalidOptimizer(f"{text}: {pair!r} is not KEY=VALUE")
        if key.strip() == "group":
            values.setdefault("group", []).append(given)
        else:
            values[key.strip()] = value(given)
    return values


def _group(text: str, given: str) -> VariableGroup:
    """Parses PATTERN|SETTING|SETTING."""
    pattern, *settings = given.split("|")
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, number = setting.partition("=")
        if key not in _GROUP_KEYS or (key == "frozen" and equals) or (key != "frozen" and not equals) or key in found:
            raise InvalidOptimizer(
                f"{text}: {setting!r} of the group for {pattern!r} is no setting, or is repeated; give rate=FACTOR, "
                "weight_decay=NUMBER or frozen, each once"
            )
        found[key] = value(number) if equals else True
    if not found:
        raise InvalidOptimizer(
            f"{text}: the group for {pattern!r} has no setting; give one, such as group={pattern or '*bias'}|rate=0.1"
        )
    return VariableGroup(pattern, **found)


def _known(kind: Any, name: str) -> Any:
    if name not in kind.registry:
        raise InvalidOptimizer(f"unknown {kind.kind} {name!r}; choose one of {', '.join(sorted(kind.registry))}")
    return kind.registry[name]


def _fields(kind: Any) -> dict[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in dataclasses.fields(kind)}


def _aliases(kind: type[Optimizer]) -> set[str]:
    return {"betas"} if issubclass(kind, Adam) else set()


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


__all__ = ["SYNTAX", "parse", "parse_plateau"]

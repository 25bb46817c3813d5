"""Options of a command that set the fields of a job.

No field is named here. The field descriptions (`shoal._job.description`) say what an option does and how it is parsed.
"""

import dataclasses
import functools
import inspect
import keyword
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shoal._job.description import Option, OptionGroup, descriptions
from shoal.job import Job


@dataclass(frozen=True)
class _JobOption:
    """One option and the field that it sets.

    Attributes:
        group: name of the policy of the job that has the field. Empty means the job itself.
        field: the field's name.
        option: the option from the field's description.
        kind: the field's type.
        default: the field's default, or `dataclasses.MISSING` if the field has a default factory.
    """

    group: str
    field: str
    option: Option
    kind: Any
    default: Any

    @property
    def parameter(self) -> str:
        """The name of the command's parameter: the option's name as a Python identifier."""
        name = (self.option.flags[0] if self.option.flags else self.field).lstrip("-").replace("-", "_").lower()
        return f"{name}_" if keyword.iskeyword(name) else name

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return self.kind is bool

    def signature(self) -> inspect.Parameter:
        """Returns the parameter in the form that typer reads."""
        flags, words, metavar = self.option.flags, self.option.help, self.option.metavar or None
        if flags and not flags[0].startswith("-"):
            return _parameter(self.parameter, str, typer.Argument(metavar=flags[0], help=words))
        info, takes = typer.Option(*flags, metavar=metavar, help=words), self.option.takes or self.kind
        if self.is_switch:
            return _parameter(self.parameter, bool, info, False)
        if self.group:  # the policy chooses its own defaults
            return _parameter(self.parameter, takes | None, info, None)
        default = self.default if self.option.default is None else self.option.default
        return _parameter(self.parameter, takes, info, None if default is dataclasses.MISSING else default)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the field's value by its name, or nothing if the command line does not set it."""
        value = values[self.parameter]
        if self.is_switch:
            return {self.field: not self.option.turns_off} if value else {}
        if value is None:
            return {}
        return {self.field: self.option.read(value) if self.option.read else value}


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a job to a typer command, before the command's own options.

    Args:
        command: a function whose first parameter is a function that builds the job from the command line. That function
            raises InvalidJob or InvalidOptimizer if the options are invalid.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = list(_options(Job))
    parameters = [*(each.signature() for each in options), *(it.replace(kind=it.KEYWORD_ONLY) for it in own)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(lambda: _job_from(values), **{it.name: values[it.name] for it in own})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # typer reads both
    run.__annotations__ = {it.name: it.annotation for it in parameters}
    return run


def _job_from(values: Mapping[str, Any]) -> Job:
    """Builds the job that a command line describes."""
    fields: dict[str, dict[str, Any]] = {}
    for option in _options(Job):
        fields.setdefault(option.group, {}).update(option.read(values))
    for name, each in descriptions(Job).items():
        if isinstance(each.option, OptionGroup):
            fields[""][name] = each.option.build(fields[name])
    return Job(**fields[""])


def _options(kind: type[Any], group: str = "") -> Iterator[_JobOption]:
    """Yields all options in the order of the fields."""
    fields = {it.name: it for it in dataclasses.fields(kind)}
    for name, each in descriptions(kind).items():
        if isinstance(each.option, OptionGroup):
            yield from _options(each.option.kind, name)
        elif each.option is not None:
            yield _JobOption(group, name, each.option, fields[name].type, fields[name].default)


def _parameter(name: str, takes: Any, info: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[takes, info])


__all__ = ["with_job_options"]

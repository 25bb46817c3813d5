"""Checks of single fields. Each raises InvalidJob, whose message says what is wrong and what is allowed."""

import sys
from collections.abc import Collection
from dataclasses import dataclass

from shoal import errors
from shoal._limits import catalogue

# The largest values of the message's fields.
UINT32, UINT64 = 2**32 - 1, 2**64 - 1
# The largest number of steps. `shoal._wire.limits.MAX_STEP` is the number after it.
MOST_STEPS = catalogue.MAX_STEP.default - 1
STEPS = f"a whole number from 0 to {MOST_STEPS}; the limit MAX_STEP is 2^53"
_SUFFIX = ".py"
_MAIN = "__main__"
_STANDARD_LIBRARY = sys.stdlib_module_names | {*sys.builtin_module_names}


@dataclass(frozen=True)
class Number:
    """The check of a whole number.

    Attributes:
        least: smallest allowed number.
        most: largest allowed number.
        words: description of the allowed numbers for the message. "" means "a whole number from ... to ...".
    """

    least: int
    most: int
    words: str = ""

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            words = self.words or f"a whole number from {self.least} to {self.most}"
            raise errors.InvalidJob(f"{field} is {value!r}; it must be {words}", **_detail(field, value))


@dataclass(frozen=True)
class OneOf:
    """The check of a name from a fixed set."""

    names: Collection[str]

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, str) or value not in self.names:
            raise errors.InvalidJob(
                f"{field} is {value!r}; it must be one of {', '.join(self.names)}", **_detail(field, value)
            )


@dataclass(frozen=True)
class Instance:
    """The check of an instance of a class.

    Attributes:
        kind: the class.
        hint: end of the message, which says what to give instead.
        optional: whether None is allowed, too.
        verb: "is", or "are" if the field's name is a plural.
    """

    kind: type
    hint: str
    optional: bool = False
    verb: str = "is"

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, self.kind) and not (self.optional and value is None):
            raise errors.InvalidJob(f"{field} {self.verb} {_shown(value)}; {self.hint}")


def _shown(value: object) -> str:
    """Returns the repr of a value, or its class if the repr has several lines, as that of PyTorch's optimizers has."""
    text, kind = repr(value), type(value)
    return f"a {kind.__module__}.{kind.__qualname__}" if "\n" in text else text


def flag(field: str, value: object) -> None:
    """Raises InvalidJob unless the value is True or False."""
    if not isinstance(value, bool):
        raise errors.InvalidJob(f"{field} is {value!r}; it must be True or False", **_detail(field, value))


def program_name(field: str, value: object) -> None:
    """Raises InvalidJob unless the value is the name of a factory in a module that can be imported, or ""."""
    if not isinstance(value, str):
        raise errors.InvalidJob(
            f"{field} is {value!r:.200}; it must be the text package.module:factory{_name_of(value)}"
        )
    module, colon, factory = value.partition(":")
    named = bool(colon) and all(part.isidentifier() for part in [*module.split("."), factory])
    if value and not named:
        raise errors.InvalidJob(
            f"{field} {value!r} does not name a factory; write package.module:factory{_meant(value)}", program=value
        )
    _check_module(value)


def check_importable(program: str) -> None:
    """Checks that a program may be in a module that workers can import. It imports nothing.

    Args:
        program: package.module:factory, or "".

    Raises:
        InvalidJob: the name is that of a file, or the module is `__main__`.
        ProgramNotAllowed: its module is one of the standard library.
    """
    _check_module(program)
    check_not_standard_library(program)


def _check_module(program: str) -> None:
    """Raises InvalidJob if a program is in a file by name, or in `__main__`."""
    module, _, factory = program.partition(":")
    if module == _MAIN:
        raise errors.InvalidJob(f"program {program}: {_not_main(factory)}", program=program)
    if module.endswith(_SUFFIX):
        raise errors.InvalidJob(
            f"program {program!r} names a file, and workers import modules; drop {_SUFFIX}: "
            f"{module.removesuffix(_SUFFIX)}:{factory}",
            program=program,
        )


def _name_of(value: object) -> str:
    """Returns what to write instead of a class or a function, as the end of a message."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return ""
    return f". {_not_main(name)}" if module == _MAIN else f", here {f'{module}:{name}'!r}"


def _not_main(factory: str) -> str:
    """Returns why workers cannot import a factory of `__main__`, and what to do, with its own name."""
    factory = factory if factory.isidentifier() else "FACTORY"
    module = "program" if factory == "FACTORY" else factory.lower()
    return (
        "Workers cannot import what is defined in a script or a notebook itself (__main__). Save it as a module in a "
        f"folder of the workers' --path, in a notebook with a cell that begins with %%writefile {module}.py, and name "
        f"it as {module}:{factory}"
    )


def _meant(value: str) -> str:
    """Returns what a name that is invalid may stand for, as the end of a message; empty if nothing is likely."""
    module, colon, factory = value.replace("\\", "/").rpartition(":")
    if not colon:
        module, factory = (value, "FACTORY") if "/" in value or value.endswith(_SUFFIX) else value.rpartition(".")[::2]
    folder, _, file = module.rpartition("/")
    meant = f"{file.removesuffix(_SUFFIX)}:{factory}"
    if not all(part.isidentifier() for part in meant.replace(":", ".").split(".")):
        return ""
    where = f", and give workers its folder (shoal up --path {folder})" if folder.strip("./") else ""
    return f", such as {meant}{where}"


def check_not_standard_library(program: str) -> None:
    """Checks that a program is not in Python's standard library, whose functions are never programs.

    Args:
        program: package.module:factory, or "".

    Raises:
        ProgramNotAllowed: its module is one of the standard library.
    """
    module = program.partition(":")[0]
    if module.partition(".")[0] in _STANDARD_LIBRARY:
        raise errors.ProgramNotAllowed(
            f"program {program}: {module} is a module of Python's standard library, which has no programs; name a "
            "module of your own, and rename it if it has the name of one of the standard library",
            program=program,
        )


def _detail(field: str, value: object) -> dict[str, object]:
    """Returns the error's details: the value by the field's name, without the owner's name."""
    return {field.partition(" ")[0]: value}


__all__ = [
    "MOST_STEPS",
    "STEPS",
    "UINT32",
    "UINT64",
    "Instance",
    "Number",
    "OneOf",
    "check_importable",
    "check_not_standard_library",
    "flag",
    "program_name",
]

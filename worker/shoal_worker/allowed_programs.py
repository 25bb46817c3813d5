"""Programs that jobs may name on this worker. The decision is made before any module of a program is imported.

A module is found as Python's import system would find it, but without running any code of it or of its packages.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder

from shoal import errors
from shoal._job.checks import check_not_standard_library
from shoal._security import PERMISSIONS

# The pattern that stands for the modules under `--path`.
UNDER_PATH = "."
DEFAULT_PATTERNS = (UNDER_PATH, "shoal_nn")
_MAX_PATTERN_CHARACTERS = 256
# Between a submitter and a pattern. Neither can contain it, so no pattern can be misread. A colon would be ambiguous:
# it separates a module from its factory.
OF_SUBMITTER = "="
# Before an access role, in place of the name of a submitter.
OF_ROLE = "@"
# The access roles that may submit jobs.
SUBMITTING_ROLES = frozenset(role.value for role in PERMISSIONS["shoal.v1.Jobs/Submit"])
# Characters of a pattern besides those of identifiers.
_PUNCTUATION = frozenset(".:*?[]!-")


@dataclass(frozen=True, slots=True)
class AllowedPrograms:
    """The rule by which a worker allows programs.

    Attributes:
        paths: folders that programs are imported from, before all others.
        patterns: what is allowed. A pattern is a module, which includes all modules of a package, or module:factory;
            `*` and `?` stand for any characters. "." stands for the modules under `paths`. SUBMITTER=PATTERN allows
            the pattern only to jobs of that submitter, and @ROLE=PATTERN only to jobs of submitters with that access
            role.

    Raises:
        BadRequest: a pattern is invalid.
    """

    paths: Sequence[str]
    patterns: Sequence[str] = DEFAULT_PATTERNS

    def __post_init__(self) -> None:
        for given in self.patterns:
            submitter, pattern = _split(given)
            known = all(letter.isidentifier() or letter.isdigit() or letter in _PUNCTUATION for letter in pattern)
            if not pattern or not known or submitter == "" or len(given) > _MAX_PATTERN_CHARACTERS:
                raise errors.BadRequest(
                    f"{given!r:.300} is not a pattern of programs; give --allow-program a module such as "
                    f"vision.models, module:factory, or {UNDER_PATH!r} for the modules under --path, in at most "
                    f"{_MAX_PATTERN_CHARACTERS} characters; SUBMITTER=PATTERN allows it only to one submitter, and "
                    "@ROLE=PATTERN only to one access role",
                    pattern=given,
                )
            if submitter and submitter.startswith(OF_ROLE) and submitter.removeprefix(OF_ROLE) not in SUBMITTING_ROLES:
                roles = ", ".join(f"{OF_ROLE}{role}" for role in sorted(SUBMITTING_ROLES))
                raise errors.BadRequest(
                    f"--allow-program {given!r:.300} names an access role that submits no jobs; use one of: {roles}",
                    pattern=given,
                )

    def check(self, reference: str, submitter: str = "", role: str = "") -> None:
        """Checks that a program may be imported. It imports nothing itself.

        Args:
            reference: package.module:factory.
            submitter: the name of the job's submitter; empty if it is not known.
            role: the access role of the submitter; empty if it is not known.

        Raises:
            ProgramNotAllowed: no pattern allows the program to this submitter, or its module belongs to Python's
                standard library.
            ProgramError: the module does not exist.
        """
        check_not_standard_library(reference)
        patterns = self._patterns_for(submitter, role)
        if any(_matches(pattern, reference) for pattern in patterns if pattern != UNDER_PATH):
            return
        module = reference.partition(":")[0]
        found, is_under_path = self._find(module)
        if is_under_path and UNDER_PATH in patterns:
            return
        searched = ", ".join(self.paths) or "none"
        if not found and UNDER_PATH in patterns:
            raise errors.ProgramError(
                f"program {reference}: No module named {module!r} in the folders of --path ({searched}); "
                f"{advice_on_missing(reference)}",
                program=reference,
            )
        where = f"{module} is not allowed"
        if found and not is_under_path:
            where = f"{module} is {found}, which is not under --path ({searched})"
        whose = f" to jobs of {submitter}" if submitter else ""
        whose += f" ({role})" if role else ""
        raise errors.ProgramNotAllowed(
            f"program {reference}: {where}; this worker allows {', '.join(patterns) or 'no programs'}{whose}. Put the "
            "module in a folder of --path, or start the worker with a further --allow-program (from Python: path= and "
            "allow_programs= of LocalCluster)",
            program=reference,
            submitter=submitter,
        )

    def _patterns_for(self, submitter: str, role: str) -> list[str]:
        """Returns the patterns for all submitters, and those for this one and its role, which must be known."""
        # A name that begins like a role would get the patterns of this role.
        name = "" if submitter.startswith(OF_ROLE) else submitter
        whose = {None, name or None, f"{OF_ROLE}{role}" if role else None}
        return [pattern for of, pattern in map(_split, self.patterns) if of in whose]

    def _find(self, module: str) -> tuple[str, bool]:
        """Finds the file of a module, and whether the import takes it from `paths`. No file means that none exists."""
        importlib.invalidate_caches()  # a file may be new
        places = [(folder, True) for folder in self.paths] + [(folder, False) for folder in sys.path]
        found, is_under_path = "", False
        parts = module.split(".")
        for depth, part in enumerate(parts, 1):
            spec, is_under_path, places = _find_part(part, places)
            found = (spec.origin or "") if spec else ""
            if spec is None and not places:
                return "", False
            if found and _is_other(".".join(parts[:depth]), found):
                is_under_path, places = False, [(folder, False) for folder, _ in places]
        return found, is_under_path


def advice_on_missing(reference: str) -> str:
    """Returns what to do if the module of package.module:factory does not exist."""
    module, _, factory = reference.partition(":")
    if module.endswith(".py"):
        return f"leave out .py: {module.removesuffix('.py')}:{factory}"
    return "put it there, or correct the name"


def _split(given: str) -> tuple[str | None, str]:
    """Returns the submitter of a pattern, None if it is for all submitters, and the pattern itself."""
    submitter, separator, pattern = given.partition(OF_SUBMITTER)
    return (submitter, pattern) if separator else (None, given)


def _matches(pattern: str, reference: str) -> bool:
    module, _, factory = reference.partition(":")
    wanted, colon, function = pattern.partition(":")
    if colon:
        return fnmatchcase(module, wanted) and fnmatchcase(factory, function)
    return fnmatchcase(module, wanted) or fnmatchcase(module, f"{wanted}.*")


def _find_part(part: str, places: Sequence[tuple[str, bool]]) -> tuple[ModuleSpec | None, bool, list[tuple[str, bool]]]:
    """Finds one part of a module's name.

    It does not call `importlib.util.find_spec`, which imports the packages around a module.

    Args:
        part: the name without its packages.
        places: folders to search, in order, and whether each belongs to `--path`.

    Returns:
        The module, None if it is a package without a file or does not exist; whether it belongs to `--path`; and the
        folders of a package's modules.
    """
    portions: list[tuple[str, bool]] = []
    for folder, ours in places:
        spec = PathFinder.find_spec(part, [folder])
        if spec is None:
            continue
        inner = [(place, ours) for place in spec.submodule_search_locations or ()]
        if spec.loader is not None and spec.origin is not None:
            return spec, ours, inner
        portions += inner
    return None, False, portions


def _is_other(name: str, file: str) -> bool:
    """Returns whether a module of this name is loaded from another file, so that an import would return that one."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None:
        return name in sys.modules
    return os.path.realpath(spec.origin or "") != os.path.realpath(file)


__all__ = ["DEFAULT_PATTERNS", "OF_ROLE", "OF_SUBMITTER", "UNDER_PATH", "AllowedPrograms", "advice_on_missing"]

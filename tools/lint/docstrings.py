"""Lint of docstrings: a public function explains its parameters, and the first line of a module is a noun phrase.

    python tools/lint/docstrings.py

It looks at the first line of each module, also of tests, benchmarks, examples and tools. The line must not begin with a
question word or with a verb, as in "Returns the ...": a noun phrase says what the module is.

It looks at these functions and methods:

- the public ones in the public modules of the two packages that users import, and of the three roles;
- those that are defined in private modules of these packages, if a public module exports the function or, for a
  method, its class.

Each has a docstring, unless it is a property, an RPC, which the contract explains, or an override: a method that a base
class or a Protocol explains. Ruff's D1 rules skip methods, and functions that `__all__` lacks.

The lint requires three things of a docstring:

- A section Args names every parameter.
- A section Returns or Yields says what is returned, unless the first line begins with that verb.
- A section Raises has an entry for each exception that the function itself raises.

A method that only passes its arguments on may refer to the method that explains them: "...; see `JobStartup.join`."

All docstrings of these packages, also those of private functions, follow two rules. A line of a section Args names one
parameter, or it only refers to what explains several: "a, b: as for `open`." A class that "see `JobStartup.join`" names
exists.
"""

import ast
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "client/shoal",
    "worker/shoal_nn",
    "worker/shoal_distribute",
    "worker/shoal_worker",
    "server/shoal_coordinator",
    "server/shoal_server",
)
COMMANDS = "main.py"  # of a role: the options of a command have help texts instead
FEW = 2  # parameters that a first line can explain
WITHOUT_DOCSTRING = {"property", "cached_property", "setter", "overload", "servicer"}  # decorators
RETURNS = re.compile(r"\b(Returns|Yields|Iterates)\b")
ARGS = re.compile(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", re.MULTILINE)
# Several parameters in one line of Args, without a reference to what explains them all.
SEVERAL = re.compile(r"^[ ]{4}((?:[*\w]+, )+[*\w]+):(?! (?:as (?:for|in|those of)|see) )", re.MULTILINE | re.IGNORECASE)
REFERENCE = re.compile(r"\bsee\s+`([A-Z]\w+)(?:\.\w+)?`")
OTHERS = ("benchmarks", "examples", "tests", "tools")  # folders whose modules need a noun phrase, too
# A plural before an article, a question word or a possessive is a verb: "Crosses of columns", but "Crosses the two".
NO_NOUN = re.compile(
    r"(What|Who|Whose|Which|Whether|How|When|Where|Why|[A-Z]\w*s (an?|the|what|who|which|whether|how|its|their|all))\b"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[Path]:
    """Yields the modules of all packages, but not generated code and the commands of roles."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "v1" not in path.relative_to(ROOT / package).parts and path.name != COMMANDS:
                yield path


def heading_problem(tree: ast.Module) -> str:
    """Returns what is wrong with the first line of a module's docstring; empty if nothing is, or there is none."""
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    return f"{first!r} is no noun phrase: say what the module is" if NO_NOUN.match(first) else ""


def is_public(path: Path) -> bool:
    """Returns whether no part of a module's path begins with an underscore, but for `__init__` and `__main__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return not any(part.startswith("_") and not part.startswith("__") for part in parts)


def exported(tree: ast.Module) -> dict[str, set[str]]:
    """Returns what a module exports again: by the module that defines it, the names that are also in `__all__`."""
    listed: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
            listed |= {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    found: dict[str, set[str]] = {}
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and imported.module:
            names = {each.name for each in imported.names if (each.asname or each.name) in listed}
            found.setdefault(imported.module, set()).update(names)
    return found


def module_name(path: Path) -> str:
    """Returns the name by which a module is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_names(exports: Mapping[Path, Mapping[str, set[str]]]) -> dict[str, set[str]]:
    """Returns the names that public modules export again, also by way of private packages.

    Args:
        exports: by module, what `exported` returns.

    Returns:
        By the name of the module that defines or passes them on: the names.
    """
    found: dict[str, set[str]] = {}
    queue = [names for path, names in exports.items() if is_public(path)]
    private = {module_name(path): names for path, names in exports.items() if not is_public(path)}
    while queue:
        for module, names in queue.pop().items():
            if new := names - found.get(module, set()):
                found.setdefault(module, set()).update(new)
                queue.append({origin: each & new for origin, each in private.get(module, {}).items()})
    return found


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function, str | None]]:
    """Yields the public functions of a module and of its public classes: qualified name, function, docstring.

    The docstring of a class explains its constructor.
    """
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, ast.get_docstring(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, Function) and (inner.name == "__init__" or not inner.name.startswith("_")):
                    documented = node if inner.name == "__init__" else inner
                    yield f"{node.name}.{inner.name}", inner, ast.get_docstring(documented)


def parameters(function: Function) -> list[str]:
    """Returns the names of a function's parameters, without self, cls and those that begin with an underscore."""
    found = function.args
    names = [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    names += [each.arg for each in (found.vararg, found.kwarg) if each]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def last_name(node: ast.expr) -> str:
    """Returns the last part of a dotted name, without a subscript; empty if it is no name."""
    match node:
        case ast.Subscript(value=ast.expr() as value):
            return last_name(value)
        case ast.Name(id=str(name)) | ast.Attribute(attr=str(name)):
            return name
    return ""


def raised(function: Function) -> set[str]:
    """Returns the names of the exception classes that a function raises itself."""
    calls = (
        node.exc.func for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    )
    return {name for name in map(last_name, calls) if name[:1].isupper()}


class Explained:
    """The methods that base classes and Protocols explain.

    Args:
        trees: all modules.

    Attributes:
        classes: the names of all classes.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self._classes: dict[str, list[ast.ClassDef]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, []).append(node)
        self.classes = self._classes.keys()
        self._by_protocols = {
            name
            for found in self._classes.values()
            for each in found
            if "Protocol" in map(last_name, each.bases)
            for name in documented(each)
        }

    def has(self, owner: ast.ClassDef, method: str) -> bool:
        """Returns whether a base class, or any Protocol with this method, explains a method.

        A base class outside of Shoal explains all methods.
        """
        if method in self._by_protocols:
            return True
        for base in set(map(last_name, owner.bases)) - {"Protocol", "Generic", "ABC"}:
            for found in self._classes.get(base, ()):
                if method in documented(found) or self.has(found, method):
                    return True
            if base not in self._classes:
                return True
        return False


def documented(owner: ast.ClassDef) -> set[str]:
    """Returns the names of a class's methods that have a docstring."""
    return {each.name for each in owner.body if isinstance(each, Function) and ast.get_docstring(each)}


def undocumented(tree: ast.Module, explained: Explained) -> Iterator[tuple[str, Function]]:
    """Yields the public functions and methods of a module that nothing explains: qualified name, function."""
    owners = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, function, text in public_functions(tree):
        owner = owners.get(name.partition(".")[0])
        kinds = set(map(last_name, function.decorator_list))
        if text is not None or function.name == "__init__" or kinds & WITHOUT_DOCSTRING:
            continue
        if owner is None or not explained.has(owner, function.name):
            yield name, function


def refers(function: Function, text: str) -> bool:
    """Returns whether a function is one call of another one, to which its docstring refers."""
    _, *body = function.body  # the first statement is the docstring
    called = re.search(r"; see `(?:\w+\.)?(\w+)`\.$", text)
    if not called or len(body) != 1 or not isinstance(body[0], (ast.Return, ast.Expr)):
        return False
    call = body[0].value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == called.group(1)


def problems(function: Function, text: str | None) -> Iterator[str]:
    """Yields what is missing in a function's docstring."""
    names = parameters(function)
    if text is None or len(names) <= FEW or refers(function, text):
        return
    section = ARGS.search(text)
    listed = section.group(1) if section else ""
    if missing := [name for name in names if not re.search(rf"^\s+[\w*, ]*\b{name}\b[\w, ]*:", listed, re.MULTILINE)]:
        yield f"Args lacks {', '.join(missing)}"
    result = ast.unparse(function.returns) if function.returns else "None"
    if result not in ("None", "Self", "NoReturn") and not RETURNS.search(text):
        yield "Returns is missing"
    section = re.search(r"^Raises:\n((?:[ ]{4}.*\n?|\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^[ ]{4}([\w., ]+):", section.group(1), re.MULTILINE) if section else []
    explained = {name.rpartition(".")[2] for entry in entries for name in re.split(r",\s*|\s+or\s+", entry)}
    if lacking := [name for name in sorted(raised(function)) if name not in explained]:
        yield f"Raises lacks {', '.join(lacking)}"


def text_problems(tree: ast.Module, classes: Container[str]) -> Iterator[tuple[int, str]]:
    """Yields the line of each class or function whose docstring breaks a rule for all docstrings, and the problem."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, Function)) and (text := ast.get_docstring(node)):
            section = ARGS.search(text)
            for names in SEVERAL.findall(section.group(1)) if section else ():
                yield node.lineno, f"Args names {names} in one line: give each its own"
            for name in REFERENCE.findall(text):
                if name not in classes:
                    yield node.lineno, f"there is no class {name}"


def main() -> int:
    """Prints each problem as file:line: function: problem; returns 1 if there is one."""
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    others = {path: ast.parse(path.read_text()) for folder in OTHERS for path in sorted((ROOT / folder).rglob("*.py"))}
    headings = {path: problem for path, tree in (trees | others).items() if (problem := heading_problem(tree))}
    for path, problem in headings.items():
        sys.stdout.write(f"{path.relative_to(ROOT)}:1: {problem}\n")
    count = len(headings)
    explained = Explained(trees.values())
    again = public_names({path: exported(tree) for path, tree in trees.items()})
    for path, tree in trees.items():
        names = None if is_public(path) else again.get(module_name(path), set())
        found = [(*each, "there is no docstring") for each in undocumented(tree, explained)]
        for name, function, text in public_functions(tree):
            found += [(name, function, problem) for problem in problems(function, text)]
        for line, problem in text_problems(tree, explained.classes):
            sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {problem}\n")
            count += 1
        for name, function, problem in found:
            if names is None or name.partition(".")[0] in names:
                sys.stdout.write(f"{path.relative_to(ROOT)}:{function.lineno}: {name}: {problem}\n")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

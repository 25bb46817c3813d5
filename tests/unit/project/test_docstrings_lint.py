"""Lint of docstrings: it finds what a reader of the API reference would miss."""

import ast

import pytest
from lint.docstrings import (
    ROOT,
    Explained,
    exported,
    heading_problem,
    is_public,
    module_name,
    problems,
    public_functions,
    public_names,
    text_problems,
    undocumented,
)

WHOLE = """
    First line.

    Args:
        a: the first.
        b: the second.
        c: the third.

    Returns:
        All of them.

    Raises:
        BadRequest: c is wrong.
    """


def found(docstring: str, result: str = "int") -> list[str]:
    source = f"def f(a, b, *, c) -> {result}:\n    {docstring!r}\n    raise errors.BadRequest('no')\n"
    return [
        problem for _, function, text in public_functions(ast.parse(source)) for problem in problems(function, text)
    ]


def test_a_whole_docstring_has_no_problem() -> None:
    assert found(WHOLE) == []


@pytest.mark.parametrize(
    ("cut", "problem"),
    [
        ("        c: the third.\n", "Args lacks c"),
        ("    Returns:\n", "Returns is missing"),
        ("        BadRequest: c is wrong.\n", "Raises lacks BadRequest"),
    ],
)
def test_what_is_missing_is_named(cut: str, problem: str) -> None:
    assert found(WHOLE.replace(cut, "")) == [problem]


def test_an_exception_that_is_only_mentioned_is_not_explained() -> None:
    entry = "        BadRequest: c is wrong.\n"
    assert found(WHOLE.replace(entry, "        ValueError: instead of BadRequest.\n")) == ["Raises lacks BadRequest"]
    assert found(WHOLE.replace(entry, "        ValueError, errors.BadRequest: c is wrong.\n")) == []


@pytest.mark.parametrize(
    ("line", "sound"),
    [
        ("What a session waits for.", False),
        ("How jobs end.", False),
        ("Returns the names of all files.", False),
        ("Crosses of categories.", True),
        ("Files that commands write.", True),
        ("Status of jobs.", True),
        ("Whatever remains.", True),
    ],
)
def test_the_first_line_of_a_module_is_a_noun_phrase(line: str, sound: bool) -> None:
    assert (heading_problem(ast.parse(f'"""{line}"""')) == "") is sound


def test_names_that_public_modules_export_again_are_public() -> None:
    package, inner = ROOT / "client/shoal/a/__init__.py", ROOT / "client/shoal/a/_b/__init__.py"
    assert [is_public(package), is_public(inner)] == [True, False]
    assert module_name(inner) == "shoal.a._b"
    exports = {
        package: exported(ast.parse("from shoal.a._b import C, D\n__all__ = ['C']\n")),
        inner: exported(ast.parse("from shoal.a._b._c import C, E\n__all__ = ['C', 'E']\n")),
    }
    assert public_names(exports) == {"shoal.a._b": {"C"}, "shoal.a._b._c": {"C"}}


def test_nothing_need_be_returned_by_what_returns_nothing() -> None:
    assert found(WHOLE.replace("Returns", "So"), "None") == []


def test_a_constructor_is_explained_by_its_class() -> None:
    tree = ast.parse("class A:\n    'It is.'\n    def __init__(self, a, b, c): ...\n    def _f(self, a, b, c): ...\n")
    assert [(name, text) for name, _, text in public_functions(tree)] == [("A.__init__", "It is.")]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("raise ValueError('no')", ["Raises lacks ValueError"]),
        ("raise module.StorageLost('no')", ["Raises lacks StorageLost"]),
        ("raise self.failed('no')", []),
        ("raise error", []),
    ],
)
def test_exception_of_any_class_is_to_be_explained(statement: str, problem: list[str]) -> None:
    source = f"def f(a, b, *, c) -> int:\n    {WHOLE!r}\n    {statement}\n"
    [(_, function, text)] = public_functions(ast.parse(source))
    assert [*problems(function, text)] == problem


def test_function_that_nothing_explains_is_found() -> None:
    tree = ast.parse("""
class Reader(Protocol):
    def read(self):
        'Reads.'
class Base:
    def begin(self):
        'Begins.'
class Middle(Base): ...
class File(Middle):
    def begin(self): ...
    def read(self): ...
    def seek(self): ...
    @property
    def size(self): ...
    def _hidden(self): ...
class Service(generated.Servicer):
    def Get(self): ...
class Hidden:
    @rpc.servicer
    def Get(self): ...
def plain(): ...
def told():
    'Says.'
""")
    assert [name for name, _ in undocumented(tree, Explained([tree]))] == ["File.seek", "plain"]


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        (
            "First line.\n\n    Args:\n        a, b: one and the other.\n",
            ["Args names a, b in one line: give each its own"],
        ),
        ("First line.\n\n    Args:\n        a, b: as for `open`.\n", []),
        ("Does it; see `Lost.found`.", ["there is no class Lost"]),
        ("Does it; see `Known.found`.", []),
    ],
)
def test_rules_for_all_docstrings(docstring: str, problem: list[str]) -> None:
    tree = ast.parse(f"def _f(a, b):\n    {docstring!r}\n")
    assert [problem for _, problem in text_problems(tree, {"Known"})] == problem

"""Pages of the Python API: one directive of mkdocstrings for each public name."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

from markdown_text import page, table, text

import shoal
from shoal import errors

MODULES = (
    "shoal",
    "shoal.callbacks",
    "shoal.consistency",
    "shoal.data",
    "shoal.data.augment",
    "shoal.errors",
    "shoal.evaluation",
    "shoal.events",
    "shoal.initializers",
    "shoal.jax",
    "shoal.keras",
    "shoal.optim",
    "shoal.partitioners",
    "shoal.program",
    "shoal.ray",
    "shoal.slurm",
    "shoal.status",
    "shoal.timings",
    "shoal.torch",
    "shoal.transformers",
    "shoal_nn",
    "shoal_nn.models",
    "shoal_nn.programs",
    "shoal_distribute",
    "shoal_distribute.collectives",
    "shoal_distribute.coordinator",
    "shoal_distribute.experimental",
    "shoal_distribute.experimental.coordinator",
    "shoal_distribute.experimental.partitioners",
    "shoal_distribute.keras",
    "shoal_distribute.keras.activations",
    "shoal_distribute.keras.applications",
    "shoal_distribute.keras.callbacks",
    "shoal_distribute.keras.config",
    "shoal_distribute.keras.constraints",
    "shoal_distribute.keras.datasets",
    "shoal_distribute.keras.datasets.cifar10",
    "shoal_distribute.keras.initializers",
    "shoal_distribute.keras.layers",
    "shoal_distribute.keras.losses",
    "shoal_distribute.keras.metrics",
    "shoal_distribute.keras.models",
    "shoal_distribute.keras.optimizers",
    "shoal_distribute.keras.optimizers.schedules",
    "shoal_distribute.keras.regularizers",
    "shoal_distribute.keras.saving",
    "shoal_distribute.keras.utils",
    "shoal_distribute.nn",
    "shoal_distribute.pipeline",
    "shoal_distribute.train",
)

# Their frameworks need not be installed.
ADAPTERS = frozenset({"shoal.jax", "shoal.keras", "shoal.ray", "shoal.torch", "shoal.transformers"})


def public_names(module: str) -> list[str]:
    """Returns the full names of what a module exports, modules and dunder names left out."""
    if module in ADAPTERS:
        names = next(
            ast.literal_eval(it.value)
            for it in _tree(module).body
            if isinstance(it, ast.Assign) and ast.unparse(it.targets[0]) == "__all__"
        )
    else:
        found = importlib.import_module(module)
        names = [it for it in found.__all__ if not it.startswith("__") and not inspect.ismodule(getattr(found, it))]
    return [f"{module}.{name}" for name in names]


def _tree(module: str) -> ast.Module:
    """Returns the source of a package, which need not be importable here."""
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    return ast.parse(Path(spec.origin).read_text())


def _file(module: str) -> str:
    return f"{module.replace('.', '-').replace('_', '-')}.md"


def _summary(module: str) -> str:
    doc = ast.get_docstring(_tree(module)) if module in ADAPTERS else inspect.getdoc(importlib.import_module(module))
    return text((doc or "").split("\n\n")[0])


def _directive(name: str, depth: int) -> Iterator[str]:
    yield from (f"::: {name}", "    options:", f"      heading_level: {depth}", "")


def _module(module: str) -> str:
    lines = [
        f"# {module}",
        "",
        f"::: {module}",
        "    options:",
        "      members: false",
        "      show_root_heading: false",
    ]
    lines += ["      show_root_toc_entry: false", ""]
    names = public_names(module)
    if module == "shoal":
        failures = {name for name in names if name.removeprefix("shoal.") in errors.__all__}
        lines += ["## Cluster, jobs and sessions", ""]
        for name in [it for it in names if it not in failures]:
            lines += _directive(name, 3)
        lines += ["## Errors", "", "The [catalogue](../errors/index.md) has all errors with their codes.", ""]
        names, depth = sorted(failures), 3
    else:
        depth = 2
    for name in names:
        lines += _directive(name, depth)
    return page(lines)


def pages() -> dict[str, str]:
    """Returns a page for each public module, and their index."""
    found = {f"reference/python/{_file(module)}": _module(module) for module in MODULES}
    rows = ([f"[`{module}`]({_file(module)})", _summary(module)] for module in MODULES)
    lines = [
        "# Python API",
        "",
        f"The public names of Shoal {shoal.__version__}, from their docstrings.",
        "A name that begins with an underscore, and a module that is not listed here, is internal;",
        "[Stability](../../explanation/stability.md) says what that means.",
        *table(["module", "purpose"], rows),
    ]
    return found | {"reference/python/index.md": page(lines)}

"""Options of `shoal submit`: they are made from the descriptions of a job's fields, and are a contract with scripts."""

import inspect
import typing
from typing import Any, Literal

import pytest
import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from shoal._cli.app import app
from shoal._cli.submit import submit

# Names, type, metavar and default of each, written down before they came from descriptions.
OPTIONS = [
    ("--name", str, None, ""),
    ("--workers -w", int, None, 1),
    ("--min-workers", int, None, 0),
    ("--max-workers", int, None, 0),
    ("--consistency", str, None, "sync"),
    ("--optimizer", str, None, "sgd:learning_rate=0.1"),
    ("--set", list[str] | None, "KEY=VALUE", None),
    ("--epochs", int, None, 1),
    ("--batch-size", int, None, 32),
    ("--range-size", int, None, 0),
    ("--max-steps", int, None, 0),
    ("--step-timeout", int, None, 0),
    ("--shards", int, None, 0),
    ("--replicas", int, None, 1),
    ("--min-replicas", int, None, 0),
    ("--seed", int, None, 0),
    ("--wire-dtype", Literal["float32", "bfloat16", "float16"], None, "float32"),
    ("--no-overlap", bool, None, False),
    ("--from", str, "CHECKPOINT", ""),
    ("--partial-restore", bool, None, False),
    ("--checkpoint-every-seconds", float | None, None, None),
    ("--checkpoint-every-steps", int | None, None, None),
    ("--no-checkpoint-at-end", bool, None, False),
    ("--keep-last", int | None, None, None),
    ("--keep-every", int | None, None, None),
    ("--evaluate-every-steps", int | None, "STEPS", None),
    ("--no-evaluation-at-end", bool, None, False),
    ("--metric", str | None, None, None),
    ("--metric-mode", Literal["auto", "min", "max"] | None, None, None),
    ("--patience", int | None, None, None),
    ("--min-delta", float | None, None, None),
    ("--checkpoint-best", bool, None, False),
    ("--reduce-on-plateau", str | None, None, None),
]
OWN = [
    "--follow -f",
    "--tensorboard",
    "--coordinator -c",
    "--retry-for",
    "--tls-ca",
    "--tls-cert",
    "--tls-key",
    "--json",
]


@pytest.fixture(scope="module")
def params() -> dict[str, TyperArgument | TyperOption]:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    found = {}
    for each in command.commands["submit"].params:
        assert isinstance(each, TyperArgument | TyperOption)
        found[" ".join(each.opts)] = each
    return found


def test_options_keep_their_order(params: dict[str, TyperArgument | TyperOption]) -> None:
    assert list(params) == ["program", *(names for names, *_ in OPTIONS), *OWN]


@pytest.mark.parametrize(("names", "takes", "metavar", "default"), OPTIONS)
def test_option_keeps_its_type_metavar_and_default(
    params: dict[str, TyperArgument | TyperOption],
    names: str,
    takes: Any,
    metavar: str | None,
    default: int | str | None,
) -> None:
    found = params[names]
    annotation = inspect.signature(submit).parameters[found.name].annotation
    assert (typing.get_args(annotation)[0], found.metavar, found.default) == (takes, metavar, default)


def test_option_has_a_help_text(params: dict[str, TyperArgument | TyperOption]) -> None:
    for names, *_ in OPTIONS:
        text = params[names].help or ""
        assert text[:1].isupper(), names
        assert text.endswith("."), names
    assert params["program"].metavar == "PROGRAM"

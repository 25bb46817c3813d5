"""Options of `shoal up` for engines: what they mean, and those that are refused because they would be ignored."""

from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import errors
from shoal._cli.app import app
from shoal._cli.engines import on_ray
from shoal._cli.engines.ray_options import parse_resources


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of clusters on Ray. None of them starts."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(on_ray, "prepare", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(on_ray, "run", lambda *_: None)
    return calls


def up(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["up", *arguments])


def test_amounts_are_read_by_role() -> None:
    assert parse_resources(["worker:CPU=4,GPU=1", "server:CPU=0.5", "worker:disk=2"]) == {
        "worker": {"CPU": 4, "GPU": 1, "disk": 2},
        "server": {"CPU": 0.5},
    }


@pytest.mark.parametrize("text", ["worker", "worker:", "worker:CPU", "worker:CPU=", "worker:CPU=two", "CPU=4"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"--resources '{text}' is not ROLE:RESOURCE=AMOUNT"):
        parse_resources([text])


def test_the_options_reach_the_cluster(prepared: list[dict[str, Any]]) -> None:
    given = ["--resources", "worker:GPU=1", "--namespace", "n", "--name", "a", "--max-workers", "3", "--idle", "5"]
    assert up("--on", "ray", *given, "--start-timeout", "60", "--wait-for-nodes").exit_code == 0
    (options,) = prepared
    expected = {"resources": {"worker": {"GPU": 1}}, "namespace": "n", "name": "a", "max_workers": 3, "idle_s": 5}
    expected |= {"start_timeout_s": 60, "wait_for_nodes": True}
    assert {name: options[name] for name in expected} == expected


def test_options_that_are_not_given_keep_the_defaults_of_the_cluster(prepared: list[dict[str, Any]]) -> None:
    assert up("--on", "ray", "--page-listen", "").exit_code == 0
    (options,) = prepared
    assert not {"resources", "namespace", "name", "max_workers", "idle_s", "start_timeout_s"} & {*options}
    assert options["page"] is False


@pytest.mark.parametrize(
    "option",
    [
        ["--name", "a"],
        ["--namespace", "n"],
        ["--resources", "worker:GPU=1"],
        ["--max-workers", "3"],
        ["--idle", "0"],
        ["--start-timeout", "60"],
        ["--wait-for-nodes"],
    ],
)
def test_options_of_ray_are_refused_without_it(option: list[str]) -> None:
    result = up("--listen", "127.0.0.1:0", *option)
    assert result.exit_code == 2
    assert f"{option[0]} has no effect without --on ray" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "option", [["--listen", "127.0.0.1:0"], ["--page-listen", "127.0.0.1:0"], ["--log-dir", "logs"]]
)
def test_options_of_this_machine_are_refused_on_ray(prepared: list[dict[str, Any]], option: list[str]) -> None:
    result = up("--on", "ray", *option)
    assert result.exit_code == 2
    assert option[0] in result.stderr
    assert "has no effect with --on ray" in " ".join(result.stderr.split())
    assert not prepared


def test_variables_of_this_machine_are_ignored_on_ray(
    prepared: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_LISTEN", "127.0.0.1:0")
    assert up("--on", "ray").exit_code == 0
    assert prepared

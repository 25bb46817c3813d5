"""Arguments of the wrong type: each public function says what to give, and calls no coordinator or server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal._session import inputs as session_inputs

NOWHERE = "127.0.0.1:1"
# A type checker refuses these arguments, too.
api: Any = shoal
inputs: Any = session_inputs
session_input: Any = session_inputs.Inputs({}, None, shoal.optim.SGD())


class Digits:
    """A program with the members that `evaluate` uses before it checks its arguments."""

    def evaluate(self) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> shoal.Client:
    return shoal.Client(NOWHERE, retry_for_s=0)


ONE_JOB = "give the name of a job, such as 'digits-1', or what `submit` returned"
CALLBACKS = r"give a list of functions or objects of shoal.callbacks, such as \[shoal.callbacks.ProgressBar\(\)\]"
SECONDS = "give a number of seconds, such as 5.0"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda client: client.submit("waves:Waves"),
            r"job is 'waves:Waves'; give a shoal.Job, such as shoal.Job\('digits:Digits', workers=2\)",
        ),
        (lambda client: client.submit(None), "job is None; give a shoal.Job"),
        (lambda client: client.job(5), f"job is 5; {ONE_JOB}"),
        (lambda client: client.pull(5), f"job is 5; {ONE_JOB}"),
        (lambda client: client.cancel(None), f"job is None; {ONE_JOB}"),
        (lambda client: client.drop(["a"]), rf"job is \['a'\]; {ONE_JOB}"),
        (lambda client: client.timings(5), f"job is 5; {ONE_JOB}"),
        (lambda client: client.job("a").timings(last="x"), "last is 'x'; it must be a whole number, 1 or more"),
        (lambda client: client.job("a").wait("5"), f"timeout_s is '5'; {SECONDS}, or None"),
        (lambda client: client.job("a").wait(callbacks=print), f"callbacks is .*; {CALLBACKS}"),
        (lambda client: client.job("a").wait(callbacks=api.callbacks.ProgressBar()), f"callbacks is .*; {CALLBACKS}"),
        (lambda client: client.job("a").wait(callbacks=["x"]), f"a callback is 'x'; {CALLBACKS}"),
        (lambda client: next(client.job("a").events("x")), "after is 'x'; it must be a whole number, 0 or more"),
        (lambda client: client.session(5), "job is 5; give the name of a job"),
        (lambda client: client.session("a", variables=5), r"variables is 5; give a dict of arrays by name"),
        (lambda _: api.Client(7070), "7070 is not the address of a coordinator; give host:port"),
        (lambda _: api.Client(NOWHERE, retry_for_s="5"), f"retry_for_s is '5'; {SECONDS}"),
        (
            lambda _: api.callbacks.ProgressBar("halves"),
            r"job is 'halves'; give a shoal.Job, such as handle.status\(\).job",
        ),
        (lambda client: api.callbacks.ProgressBar(client.job("a")), r"job is JobHandle\('a'\); give a shoal.Job"),
        (lambda _: api.callbacks.TensorBoard(5), "folder is 5; give a folder, such as 'runs/digits'"),
        (lambda _: api.evaluate("digits:Digits", {}), "program is 'digits:Digits'; give an object with the methods"),
        (lambda _: api.evaluate(Digits, {}), "program is <class .*Digits'>; give an object with the methods of"),
        (
            lambda _: api.evaluate(Digits(), "w"),
            "params is 'w'; give a dict of arrays by name, such as handle.pull()",
        ),
        (lambda _: api.evaluate(Digits(), {}, batch_size=0), "batch_size is 0; it must be a whole number, 1 or more"),
        (lambda _: api.Checkpoints(None), "url is None; give a folder or a URL"),
        (lambda _: api.data.Csv(5), "the first argument of shoal.data.Csv is 5; give a path"),
        (lambda _: api.data.Parquet([5]), "a file of shoal.data.Parquet is 5; give a path"),
        (lambda _: api.data.Cifar10(5), "folder is 5; give a folder"),
        (lambda _: api.data.Idx("a", 5), "labels is 5; give the path of a file"),
        (lambda _: api.data.ImageFolder(5, size=(3, 3)), "folder is 5; give a folder"),
        (lambda _: api.data.Subset(5, [1]), "the data set of Subset is 5; give a data set, such as shoal.data.Idx"),
        (lambda _: api.data.split(5, 0.1), "the data set of split is 5; give a data set"),
        (lambda _: session_input.updates(["mean"]), r"updates is \['mean'\]; give a dict of arrays by name"),
        (lambda _: inputs.numbers_of(["loss"]), r"metrics is \['loss'\]; give a dict of numbers by name"),
        (lambda _: inputs.lines_of(0.5), "text is 0.5; give a string"),
    ],
)
def test_is_refused_with_what_to_give(client: shoal.Client, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"^{message}"):
        call(client)


@pytest.mark.parametrize("method", ["show", "verify", "remove", "read", "remove_all"])
def test_the_name_of_a_checkpoint_is_a_string(tmp_path: Path, method: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"^name is 5; give the name of a checkpoint|^5 is not a job name"):
        getattr(shoal.Checkpoints(tmp_path), method)(5)


class TorchOptimizer:
    """An optimizer whose repr has several lines, as those of PyTorch have."""

    def __repr__(self) -> str:
        return "SGD (\nParameter Group 0\n    lr: 0.1\n)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, r"optimizer is 'sgd'; give one of shoal.optim, such as SGD\(0.1\)"),
        ({"optimizer": TorchOptimizer()}, r"optimizer is a [\w.]+\.TorchOptimizer; give one of shoal.optim"),
        ({"consistency": "sync"}, r"consistency is 'sync'; give a mode, such as Synchronous\(\)"),
        ({"workers": "2"}, "workers is '2'; it must be a whole number"),
        ({"checkpoints": "runs"}, "checkpoints are 'runs'; give a CheckpointPolicy"),
    ],
)
def test_options_of_a_session_are_those_of_a_job(client: shoal.Client, options: dict[str, Any], message: str) -> None:
    for make in (lambda: shoal.Job("a:b", **options), lambda: client.session("a", variables={}, **options)):
        with pytest.raises(errors.InvalidJob, match=message):
            make()


def test_gradients_that_are_no_iterable_are_refused() -> None:
    with pytest.raises(
        errors.InvalidGradient, match="must be a mapping by name, or pairs of name and array, not a int"
    ):
        session_input.pairs(5)


def test_one_pattern_without_a_list_is_refused() -> None:
    for patterns in ("bias", 5):
        with pytest.raises(errors.InvalidOptimizer, match=r"give a tuple of patterns, such as"):
            api.optim.AdamW(0.1, decay_exclude=patterns)

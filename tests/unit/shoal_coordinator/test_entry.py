"""Large messages of a worker's entry: a description is decoded only once."""

import gc
import weakref

import pytest

from shoal import errors, initializers
from shoal.initializers import Constant
from shoal.v1 import job_pb2, tensor_pb2
from shoal.variables import Variable
from shoal_coordinator.api.entry import Descriptions
from shoal_coordinator.messages import ProgramDescription, digest_of

VARIABLES = {"w": Variable((8, 4)), "b": Variable(4, initializer=Constant(2.0)), "s": Variable((), trainable=False)}


def request(*names: str, samples: int = 10, worker: str = "w0") -> job_pb2.DescribeRequest:
    variables = [VARIABLES[name].to_proto(name) for name in names or VARIABLES]
    return job_pb2.DescribeRequest(job="a", worker=worker, incarnation=3, variables=variables, samples=samples)


def test_the_same_description_is_decoded_once_while_a_job_has_it() -> None:
    known = Descriptions()
    first = known.decode(request())
    assert (dict(first.variables), first.samples) == (VARIABLES, 10)
    assert known.decode(request(worker="w1")) is first
    assert known.decode(request("s", "b", "w")) is first, "the order does not matter"
    assert known.decode(request(samples=11)) is not first
    assert known.decode(request("w", "b")) is not first
    kept = weakref.ref(first)
    del first
    gc.collect()
    assert kept() is None, "nothing is kept of a job that is gone"


def test_a_variable_that_is_described_twice() -> None:
    with pytest.raises(errors.InvalidVariable, match="'b' is described twice"):
        Descriptions().decode(request("w", "b", "b", samples=0))


def test_conflicts_with_and_without_digests() -> None:
    known = Descriptions()
    first = known.decode(request())
    assert first.digest == digest_of(request("b", "s", "w").variables)
    for second in (known.decode(request("s", "w", "b")), ProgramDescription(VARIABLES, 10)):
        assert first.conflict(second) == second.conflict(first) == ""
    assert first.conflict(known.decode(request(samples=11))) == "11 samples instead of 10"
    assert "variable 'b' is missing" in first.conflict(known.decode(request("w", "s")))
    other = ProgramDescription({**VARIABLES, "w": Variable((8, 5))}, 10, b"another")
    assert "variable 'w' has shape (8, 5) instead of" in first.conflict(other)
    assert first.conflict(ProgramDescription(dict(VARIABLES), 10, b"another")) == "", "a digest alone is no conflict"


def test_a_worker_may_add_up_what_an_earlier_one_averaged() -> None:
    averaged, summed = (
        ProgramDescription({"m": Variable(2, trainable=False, aggregation=kind)}, 0) for kind in ("mean", "sum")
    )
    assert averaged.conflict(summed, sums=True) == ""
    assert "aggregation sum instead of mean" in averaged.conflict(summed)
    assert "aggregation mean instead of sum" in summed.conflict(averaged, sums=True)
    wider = ProgramDescription({"m": Variable(3, trainable=False, aggregation="sum")}, 0)
    assert "shape (3,) instead of (2,)" in averaged.conflict(wider, sums=True)


def test_a_restored_description_has_the_digest_of_a_sent_one() -> None:
    sent = Descriptions().decode(request())
    stored = tensor_pb2.Placement.FromString(sent.encoded).variables
    assert ProgramDescription.from_proto(stored, 10, digest_of(stored)) == sent


def test_a_conflict_names_a_few_variables_and_what_differs() -> None:
    ours = {name: Variable((2,), initializer=initializers.Zeros()) for name in "abcdef"}
    theirs = {
        **{name: Variable((3,)) for name in "bcdef"},
        "a": Variable((2,), "float64", initializers.Given(), trainable=False, aggregation="sum"),
        "new": Variable((1,)),
    }
    said = ProgramDescription(ours, 0).conflict(ProgramDescription(theirs, 0))
    assert said == (
        "variable 'a' has dtype float64 instead of float32, initializer given values instead of Zeros(), "
        "aggregation sum instead of trainable; variable 'b' has shape (3,) instead of (2,); "
        "variable 'c' has shape (3,) instead of (2,); and 4 more"
    )
    assert ProgramDescription({"a": Variable(1)}, 0).conflict(ProgramDescription({**ours, "a": Variable(1)}, 0)) == (
        "variable 'b' is not in the job; variable 'c' is not in the job; variable 'd' is not in the job; and 2 more"
    )
    assert "Variable(" not in said

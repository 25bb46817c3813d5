"""16-bit wire dtypes on real processes: which arrays are rounded, and how bytes and accuracy change."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from digits import Digits
from numpy.typing import DTypeLike

import shoal
from shoal import optim
from shoal.job import WireDtype
from shoal.partitioners import FixedShards
from support import run_lengths
from support.clusters.cluster_probe import in_sessions, placement
from support.scraping import sample
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

HALVES: dict[WireDtype, type[np.generic]] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SYNCHRONOUS = shoal.Synchronous()
SEED = 2


@run_lengths.long_only  # the tests below check what is rounded, and how the server sums it
def test_accuracy_does_not_depend_on_the_wire_dtype(client: shoal.Client) -> None:
    """After synchronous training with one seed, the accuracy is within half a point of that with float32."""

    halves: list[WireDtype] = run_lengths.size(["bfloat16"], [*HALVES])
    how: dict[str, Any] = {
        "optimizer": optim.Adam(0.01),
        "consistency": SYNCHRONOUS,
        "epochs": 20,  # after 10, a quarter of all seeds are still below 97%
        "batch_size": 64,
        "seed": SEED,
    }
    wires: list[WireDtype] = ["float32", *halves]
    jobs = {
        wire: client.submit(
            shoal.Job("digits:Digits", name=f"digits-{wire}", workers=2, shards=1, wire_dtype=wire, **how)
        )
        for wire in wires
    }
    results = {wire: job.wait(timeout_s=100) for wire, job in jobs.items()}
    assert {result.progress.rejected for result in results.values()} == {0}
    values = {wire: job.pull() for wire, job in jobs.items()}
    accuracies = {wire: shoal.evaluate(Digits(), params)["accuracy"] for wire, params in values.items()}
    print("accuracy:", ", ".join(f"{accuracy:.2%} with {wire}" for wire, accuracy in accuracies.items()))
    assert accuracies["float32"] >= 0.97
    for wire in halves:
        assert abs(accuracies[wire] - accuracies["float32"]) <= 0.005
        assert not np.array_equal(values[wire]["hidden/w"], values["float32"]["hidden/w"]), "nothing was rounded"


class Problem:
    """Least squares with steps that are exact in float32: the rate and the number of workers are powers of 2.

    So an addition rounds once, whether or not the server fuses the multiplication with it, and every result has the
    same bits.
    """

    WORKERS, STEPS, FEATURES, RATE = 4, 30, 24, 0.125

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        shape = (self.STEPS, self.WORKERS, 32)
        self.x = rng.normal(size=(*shape, self.FEATURES)).astype(np.float32)
        self.y = (self.x @ rng.normal(size=self.FEATURES)).astype(np.float32)

    def gradient(self, w: np.ndarray, step: int, rank: int) -> np.ndarray:
        x, y = self.x[step, rank], self.y[step, rank]
        return np.asarray(x.T @ (x @ w - y) / np.float32(len(y)))

    def alone(self, wire: DTypeLike) -> np.ndarray:
        """Computes the result in one process, which rounds only the arrays that would travel."""

        def travelled(array: np.ndarray) -> np.ndarray:
            return array.astype(wire).astype(np.float32)

        w = np.zeros(self.FEATURES, np.float32)
        for step in range(self.STEPS):
            pulled = travelled(w)
            total = np.zeros_like(w)
            for rank in range(self.WORKERS):
                total += travelled(self.gradient(pulled, step, rank))
            w -= np.float32(self.RATE) * (total * np.float32(1 / self.WORKERS))
        return w


@pytest.mark.parametrize("wire", HALVES)
def test_server_sums_rounded_gradients_in_float32(client: shoal.Client, wire: WireDtype) -> None:
    problem, name = Problem(), f"rounded-{wire}"

    def loop(session: shoal.Session, rank: int) -> np.ndarray:
        for step in range(problem.STEPS):
            session.push({"w": problem.gradient(session.pull()["w"], step, rank)})
        pulled: np.ndarray = session.pull()["w"]
        return pulled

    variables = {"w": shoal.Variable((problem.FEATURES,), partitioner=FixedShards(3))}
    options: dict[str, Any] = {
        "optimizer": optim.SGD(problem.RATE),
        "consistency": SYNCHRONOUS,
        "wire_dtype": wire,
        "shards": 3,
    }
    pulled = in_sessions(client, name, problem.WORKERS, loop, variables=variables, **options)
    expected = problem.alone(HALVES[wire])
    for values in pulled:
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected.astype(HALVES[wire]).astype(np.float32))
    # Had the server kept the half, or had nothing been rounded, it would have come out differently.
    assert not np.array_equal(expected, expected.astype(HALVES[wire]).astype(np.float32))
    assert np.max(np.abs(expected - problem.alone(np.float32))) > 1e-5


@pytest.mark.parametrize("elements", [6, 300_000], ids=["small", "large"])
def test_a_gradient_that_float16_cannot_hold_is_refused_and_nothing_changes(
    client: shoal.Client, elements: int
) -> None:
    name = f"too-large-{elements}"
    options: dict[str, Any] = {"optimizer": optim.SGD(1.0), "consistency": SYNCHRONOUS, "shards": 2}
    variables = {"w": shoal.Variable(elements), "v": shoal.Variable(elements)}
    with client.session(name, variables=variables, wire_dtype="float16", **options) as session:
        session.pull()
        gradients = {"w": np.ones(elements, np.float32), "v": np.ones(elements, np.float32)}
        gradients["v"][-1] = 65_520
        with pytest.raises(shoal.NonFiniteGradient, match="'v' contains inf"):
            session.push(gradients)
        assert session.step == 0
        assert not any(values.any() for values in client.pull(name).values())
        gradients["v"][-1] = -65_519  # rounds to the last number that there is
        assert session.push(gradients).outcome == "accepted"
        after = session.pull()
    np.testing.assert_array_equal(after["w"], -1)
    assert after["v"][-1] == 65_504
    assert client.job(name).wait(timeout_s=20).progress.rejected == 1


@pytest.mark.parametrize("wire", ["float32", *HALVES])
@pytest.mark.parametrize("elements", [3_000, 600_000], ids=["as chunks", "through shared memory"])
def test_halves_take_half_the_bytes(
    shared_cluster: shoal.LocalCluster, client: shoal.Client, wire: WireDtype, elements: int
) -> None:
    pages = [page for role, page in shared_cluster.metrics.items() if role.startswith("server")]

    def moved() -> np.ndarray:
        names = "shoal_server_sent_bytes_total", "shoal_server_received_bytes_total"
        return np.array([sum(sample(page, name) for page in pages) for name in names])

    variables = {
        "kernel": shoal.Variable((elements,), partitioner=FixedShards(3)),
        "wide": shoal.Variable(100, "float64"),
        "half": shoal.Variable(100, "bfloat16"),
        "mean": shoal.Variable(100, trainable=False, aggregation="mean"),
        "count": shoal.Variable(100, "int64", trainable=False, aggregation="sum"),
    }
    each = {"kernel": 4 if wire == "float32" else 2, "wide": 8, "half": 2, "mean": 4, "count": 8}
    nbytes = {name: variable.shape[0] * each[name] for name, variable in variables.items()}
    trained = sum(nbytes[name] for name in ("kernel", "wide", "half"))
    zeros = {name: np.zeros(variable.shape, variable.dtype) for name, variable in variables.items()}
    gradients = {name: zeros[name] for name in ("kernel", "wide", "half")}
    name = f"bytes-{wire}-{elements}"
    with client.session(name, variables=variables, wire_dtype=wire, consistency=SYNCHRONOUS, shards=3) as session:
        assert len({shard.address for shard in placement(client, name).shards}) == 3
        before = moved()
        session.pull()
        session.push(gradients)
        session.pull()
        session.push(gradients, updates={"mean": zeros["mean"], "count": zeros["count"]})
        expected = [2 * sum(nbytes.values()), trained + sum(nbytes.values())]
        wait_until(lambda: (moved() - before).tolist() == expected, timeout_s=5, what=f"{expected}, and {moved()=}")


@pytest.mark.parametrize("wire", HALVES)
def test_only_trainable_float32_is_rounded(client: shoal.Client, wire: WireDtype) -> None:
    fine, large = 1 + 2**-20, 2**60 + 1
    kinds = {
        "kernel": shoal.Variable(5),
        "wide": shoal.Variable(5, "float64"),
        "mean": shoal.Variable(5, trainable=False, aggregation="mean"),
        "sum": shoal.Variable(5, trainable=False, aggregation="sum"),
        "last": shoal.Variable(5, trainable=False, aggregation="last"),
        "count": shoal.Variable(5, "int64", trainable=False, aggregation="sum"),
    }
    pushed = {name: np.full(5, large if name == "count" else fine, kind.dtype) for name, kind in kinds.items()}
    gradients = {name: pushed.pop(name) for name in ("kernel", "wide")}
    options: dict[str, Any] = {"optimizer": optim.SGD(1.0), "consistency": SYNCHRONOUS, "wire_dtype": wire}
    with client.session(f"exact-beside-{wire}", variables=kinds, **options) as session:
        session.push(gradients, updates=pushed)
        values = session.pull()
    assert {name: array[0].item() for name, array in values.items()} == {
        "kernel": -1.0,
        "wide": -fine,
        "mean": fine,
        "sum": fine,
        "last": fine,
        "count": large,
    }
    assert all(values[name].dtype == kind.dtype for name, kind in kinds.items())

"""The promises of DESIGN, on real processes: exact, bounded, counted, converging."""

import numpy as np
import pytest
from digits import Digits

import shoal
from cluster_probe import histories, in_sessions
from shoal import initializers, optim, partitioners
from shoal.v1 import parameter_server_pb2 as pb

pytestmark = pytest.mark.cluster

MODES = {
    "sync": shoal.Synchronous(),
    "async": shoal.Asynchronous(),
    "ssp": shoal.BoundedStaleness(2),
}


class TestSynchronousIsExact:
    """4 workers compute what one process computes on the joined batch, 50 steps, even with uneven batches."""

    STEPS, FEATURES, CLASSES = 50, 8, 3
    PARTS = (0, 16, 40, 48, 64)  # rows of the joined batch that each of the 4 workers takes

    def gradients(self, params, x, y):
        """Of the mean softmax cross-entropy of a linear classifier."""
        logits = x @ params["w"] + params["b"]
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        probabilities[np.arange(len(y)), y] -= 1
        probabilities /= len(y)
        return {"w": x.T @ probabilities, "b": probabilities.sum(axis=0)}

    @pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
    def test_it(self, client, dtype, tolerance):
        rng = np.random.default_rng(5)
        joined = self.PARTS[-1]
        x = rng.normal(size=(self.STEPS, joined, self.FEATURES)).astype(dtype)
        y = rng.integers(self.CLASSES, size=(self.STEPS, joined))
        start = {
            "w": rng.normal(size=(self.FEATURES, self.CLASSES)).astype(dtype),
            "b": np.zeros(self.CLASSES, dtype),
        }

        def loop(session, rank):
            rows = slice(self.PARTS[rank], self.PARTS[rank + 1])
            for step in range(self.STEPS):
                params = session.pull()
                session.push(self.gradients(params, x[step, rows], y[step, rows]), weight=rows.stop - rows.start)

        name = f"exact-{dtype}"
        in_sessions(client, name, 4, loop, variables=start, optimizer=optim.Momentum(0.1, 0.9), shards=4)

        alone = {key: value.copy() for key, value in start.items()}
        velocity = {key: np.zeros_like(value) for key, value in start.items()}
        for step in range(self.STEPS):
            for key, gradient in self.gradients(alone, x[step], y[step]).items():
                velocity[key] = velocity[key] * alone[key].dtype.type(0.9) + gradient
                alone[key] -= alone[key].dtype.type(0.1) * velocity[key]
        trained = client.pull(name)
        difference = max(np.max(np.abs(trained[key] - alone[key])) / np.max(np.abs(alone[key])) for key in alone)
        assert difference <= tolerance
        assert np.max(np.abs(trained["w"] - start["w"])) > 0.1, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_the_bound_holds(client, bound):
    """One worker 10 times slower than the others, 2,000 steps: no violation in the servers' own history."""
    steps, workers = 2_000, 3
    work = np.ones((64, 64), np.float32)
    gradient = {"w": np.ones(4, np.float32)}

    def loop(session, rank):
        for _ in range(steps):
            session.barrier()
            for _ in range(10 if rank == 0 else 1):
                work @ work
            session.push(gradient)

    name = f"bound-{bound}"
    variables = {"w": shoal.Variable((4,))}
    in_sessions(client, name, workers, loop, variables=variables, consistency=shoal.BoundedStaleness(bound), shards=1)

    ((_, history),) = histories(client, name).items()
    finished = dict.fromkeys({admission.worker for admission in history}, 0)
    assert len(finished) == workers
    leads, violations = [], 0
    for admission in history:
        if admission.kind == pb.Admission.PULL:
            # The clocks as the pushes before this line left them, not as the server says that it saw them.
            lead = admission.step - min(finished.values())
            leads.append(lead)
            violations += lead > bound
        else:
            finished[admission.worker] = admission.step + 1
    assert violations == 0
    assert set(finished.values()) == {steps}
    assert max(leads) == bound, "nobody ever got as far ahead as the bound allows, so it was not tested"


@pytest.mark.parametrize("mode", MODES)
def test_updates_are_counted(client, mode):
    """Integer gradients, 4 workers, 500 pushes each, 3 servers: the sums are equal exactly."""
    pushes, workers = 500, 4
    rng = np.random.default_rng(2)
    sent = rng.integers(-4, 5, size=(workers, pushes, 30)).astype(np.float32)
    variables = {
        "w": shoal.Variable((30,), partitioner=partitioners.FixedShards(3), initializer=initializers.Ones()),
    }

    def loop(session, rank):
        for step in range(pushes):
            session.barrier()
            session.push({"w": sent[rank, step]})

    name = f"counted-{mode}"
    options = {"variables": variables, "optimizer": optim.SGD(1.0), "consistency": MODES[mode], "shards": 3}
    in_sessions(client, name, workers, loop, **options)
    total = sent.sum(axis=(0, 1))
    share = total / workers if mode == "sync" else total
    np.testing.assert_array_equal(client.pull(name)["w"], 1 - share)


def test_an_asynchronous_run_converges(client):
    """The digits, 4 workers."""
    job = shoal.Job(
        "digits:Digits",
        name="converges",
        workers=4,
        consistency=shoal.Asynchronous(),
        optimizer=optim.Adam(0.003),
        epochs=30,
    )
    result = client.submit(job).wait(timeout_s=100)
    assert result.progress.staleness_max > 0
    assert Digits().evaluate(client.pull(job.name))["accuracy"] >= 0.97

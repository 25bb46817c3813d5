"""A plain session: your own training loop is the worker.

    shoal up --workers 0                       in one terminal
    python examples/plain_session.py           in another

For two workers, run `WORKERS=2 python examples/plain_session.py` in two terminals.

You write the loop, in any framework. A session takes and returns NumPy arrays by name:

- PyTorch: `p.data.copy_(torch.from_numpy(values[name]))` for each of `model.named_parameters()`, `loss.backward()`,
  then push `{name: p.grad.cpu().numpy()}`.
- JAX: `loss, gradients = jax.value_and_grad(loss_of)(values, batch)`, then push `gradients`. A session accepts
  JAX's arrays.
"""

import os

import numpy as np

import shoal

TRUE_WEIGHTS = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
STEPS, BATCH = 500, 64


def main() -> None:
    workers = int(os.environ.get("WORKERS", "1"))
    variables = {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}
    with (
        shoal.connect() as client,  # to $SHOAL_COORDINATOR, or 127.0.0.1:7070
        client.session("line", variables=variables, workers=workers, optimizer=shoal.optim.SGD(0.05)) as session,
    ):
        rng = np.random.default_rng(session.rank)  # each worker draws data of its own
        for _ in range(STEPS):
            values = session.pull()

            x = rng.normal(size=(BATCH, 4)).astype(np.float32)
            y = x @ TRUE_WEIGHTS + 4
            error = x @ values["w"] + values["b"] - y
            loss = (error**2).mean()
            gradients = {"w": 2 * x.T @ error / BATCH, "b": 2 * error.mean()}

            session.push(gradients, weight=BATCH, metrics={"loss": loss})
        print(f"worker {session.rank}: loss {loss:.2g}, w {values['w'].round(3)}, b {values['b'].round(3)}")


if __name__ == "__main__":
    main()

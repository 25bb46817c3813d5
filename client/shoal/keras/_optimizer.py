"""An optimizer of Keras 3 whose updates the servers of a cluster compute."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import keras
import numpy as np

from shoal import errors, optim
from shoal._adapters import ScriptEnd, check_client, check_optimizer, open_session
from shoal.client import Client
from shoal.keras._eager import eagerly
from shoal.keras._state import load_optimizer_state, state_of
from shoal.session import Session


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Trains the variables of a model in a job, together with the other workers of the job.

        model.compile(shoal.keras.DistributedOptimizer(shoal.optim.SGD(0.1), job="m", workers=2), loss="mse")
        model.fit(x, y)

    When `fit` begins, it waits until all workers of the job are there, and gives each of them the values of the first
    one. Each step pushes the gradients, and pulls the new values of all workers; in synchronous mode it waits for them.
    The compiled step of JAX calls the host for this, in order (`io_callback`), and that of TensorFlow, too
    (`py_function`). `fit` trains each worker on the data that it is given: give each its own part, for example
    `x[optimizer.session.rank :: 2]`. Variables that are not trained, such as the statistics of BatchNorm, stay with
    each worker.

    At the end of the program the session is closed, as `close` does; an uncaught exception is its error. Variables have
    the names of their paths in Keras, so all workers must name the layers alike. Keras numbers layers without a name,
    and goes on counting if a cell of a notebook runs again: give names to layers and models there.

    Args:
        optimizer: the optimizer of the job, from `shoal.optim`, with its learning rate, schedule and clipping.
        job: name of the job.
        address: host:port of the coordinator; see `shoal.Client`. Not with a client.
        client: the client to use, which stays open. None opens one.
        worker: see `shoal.Client.session`.
        on_error: see `shoal.Client.session`.
        optimizer_state: the state that the optimizer of a new job goes on from: an optimizer of Keras that has trained
            the model, or what `optimizer_state` returns for it. Each worker gives the same.
        options: see `shoal.Client.session`. Give the `batch_size` of `fit`, too: then the progress of the job counts
            samples, otherwise steps.

    Raises:
        InvalidOptimizer: the optimizer is not one of `shoal.optim`.
        BadRequest: there are an address and a client.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        *,
        job: str,
        address: str | None = None,
        client: Client | None = None,
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: keras.optimizers.Optimizer | optim.OptimizerState | None = None,
        **options: Any,
    ) -> None:
        equal = "keras.optimizers.Adam(1e-3) is shoal.optim.Adam(1e-3, eps=1e-7, eps_uncorrected=True)"
        check_optimizer(optimizer, equal)
        check_client(address, client)
        super().__init__(learning_rate=optimizer.rate(0), name="shoal")
        self._spec, self._job, self._address, self._client = optimizer, job, address, client
        self._options = {"worker": worker, "on_error": on_error, **options}
        # A function, because Keras tracks the variables of attributes.
        self._begins_with: Callable[[], Any] = lambda: optimizer_state
        self._metrics: Callable[[], dict[str, float]] = dict  # of the next push
        self._owned = ExitStack()
        self._session: Session | None = None
        self._end: ScriptEnd | None = None

    @property
    def session(self) -> Session:
        """The session of the job, for example for its `rank` and `log`. It opens when `fit` or `build` begins.

        Raises:
            BadRequest: it is not open yet.
        """
        if self._session is None:
            raise errors.BadRequest(f"the session of job {self._job} opens when fit begins; or call build before")
        return self._session

    def build(self, variables: Sequence[Any]) -> None:
        """Opens the session, and puts the values of the job into the variables. `fit` calls it."""
        super().build(variables)
        if self._session is not None:
            return
        with eagerly():
            values = {it.path: keras.ops.convert_to_numpy(it) for it in variables}
            if len(values) < len(variables):
                raise errors.InvalidVariable("two variables of the model have one path; give the layers other names")
            state = self._begins_with()
            if isinstance(state, keras.optimizers.Optimizer):
                state = state_of(state, variables)
            given = {"optimizer": self._spec, "optimizer_state": state, **self._options}
            self._session, self._owned = open_session(
                values, job=self._job, address=self._address, client=self._client, **given
            )
        self._end = ScriptEnd(self.close)
        with eagerly():
            for variable, value in zip(variables, self._pulled(variables), strict=True):
                variable.assign(value)
            self.iterations.assign(self.session.updates)

    def report(self, **metrics: float) -> None:
        """Sets the metrics that the next push reports, for example `optimizer.report(loss=0.3)`."""
        self._metrics = lambda: metrics

    def copy_state_to(self, optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
        """Puts the state of the job into an optimizer of Keras, which then goes on without Shoal.

            plain = keras.optimizers.Adam(1e-3)
            optimizer.copy_state_to(plain, model)
            model.compile(plain, loss="mse")
            model.save("model.keras")

        Call it before `close`. In synchronous mode the state belongs to the present values of the model. Other modes:
        see `shoal.Session.optimizer_state`.

        Args:
            optimizer: the optimizer of Keras that computes what the job does.
            model: the model.

        Raises:
            InvalidOptimizer: see `load_optimizer_state`.
            ShoalError: see `shoal.Session.optimizer_state`.
        """
        load_optimizer_state(self.session.optimizer_state(), optimizer, model)

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """Keras calls it in each step, with gradients that belong to the variables in their order."""
        values = self._exchanged(grads, trainable_variables)
        for variable, value in zip(trainable_variables, values, strict=True):
            variable.assign(value)

    def _exchanged(self, grads: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """Returns the new values, as tensors of the backend."""

        def exchange(*gradients: Any) -> tuple[np.ndarray, ...]:
            arrays = [np.asarray(it) for it in gradients]
            pushed = {it.path: array for it, array in zip(variables, arrays, strict=True)}
            self.session.push(pushed, metrics=self._metrics(), samples=self._options.get("batch_size"))
            return self._pulled(variables)

        backend = keras.config.backend()
        if backend == "jax":
            import jax  # noqa: PLC0415 - only the backend in use is loaded
            from jax.experimental import io_callback  # noqa: PLC0415

            shapes = [jax.ShapeDtypeStruct(it.shape, it.dtype) for it in variables]
            return io_callback(exchange, tuple(shapes), *grads, ordered=True)
        if backend == "tensorflow":
            import tensorflow as tf  # noqa: PLC0415

            found = tf.py_function(
                lambda *it: exchange(*(each.numpy() for each in it)), grads, [it.dtype for it in grads]
            )
            return [tf.ensure_shape(value, it.shape) for value, it in zip(found, variables, strict=True)]
        return exchange(*map(keras.ops.convert_to_numpy, grads))

    def _pulled(self, variables: Sequence[Any]) -> tuple[np.ndarray, ...]:
        values = self.session.pull()
        return tuple(values[it.path] for it in variables)

    def close(self, error: str | BaseException = "") -> None:
        """Closes the session of the job, if it is open; see `shoal.Session.close`. A second call does nothing."""
        if self._end is None or self._session is None:
            return
        self._end.over()
        with self._owned:
            self._session.close(error)

    def __enter__(self) -> "DistributedOptimizer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._end is None or self._session is None:
            return
        self._end.over()
        with self._owned:
            self._session.__exit__(kind, error, trace)

    def get_config(self) -> dict[str, Any]:
        """Returns what Keras stores with a model: the name of the job. The servers have the rest."""
        return {"job": self._job}


__all__ = ["DistributedOptimizer"]

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
from shoal.keras._host import call_on_host, eagerly
from shoal.keras._state import load_optimizer_state, state_of
from shoal.session import Session

_RATE = keras.KerasTensor((), "float32")


@keras.saving.register_keras_serializable("shoal")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Trains the variables of a model in a job, together with the other workers of the job.

        model.compile(shoal.keras.DistributedOptimizer(shoal.optim.SGD(0.1), job="m", workers=2), loss="mse")
        model.fit(x, y)

    When `fit` begins, it waits until all workers of the job are there, and gives each of them the values of the first
    one. Each step pushes the gradients, and pulls the new values of all workers; in synchronous mode it waits for them.
    The compiled step of JAX calls the host for this, in order (`io_callback`), and that of TensorFlow, too
    (`py_function`). `fit` trains each worker on the data that it is given: give each its own part, for example
    `x[optimizer.session.rank :: 2]`. Variables that are not trained, such as the statistics of BatchNorm, stay with
    each worker. In a synchronous step, the batches of all workers have the same weight, also if their sizes differ. A
    variable without a gradient counts as zeros.

    `learning_rate` shows the rate of the job. If a callback such as `ReduceLROnPlateau` sets another one, each step
    carries it, so it counts from the next step on. All workers must set the same rate: if they differ, the job uses
    that of the lowest rank that has changed it.

    A model that was saved with this optimizer can be loaded without a cluster. To train it again, compile it with a new
    optimizer.

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
        self._shown = _float32(optimizer.rate(0))  # the learning rate of the job, as Keras shows it
        self._from_file = False
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
        if self._from_file:
            raise errors.BadRequest(
                f"this optimizer of job {self._job} was loaded with a model, and has no session; to train the model, "
                "compile it with a new shoal.keras.DistributedOptimizer"
            )
        if self._session is None:
            raise errors.BadRequest(
                f"the session of job {self._job} is not open yet; call fit, or "
                "optimizer.build(model.trainable_variables), first"
            )
        return self._session

    def build(self, variables: Sequence[Any]) -> None:
        """Opens the session, and puts the values of the job into the variables. `fit` calls it.

        Raises:
            InvalidVariable: two variables have one path, or one has a constraint.
            InvalidOptimizer: see `optimizer_state`.
            ShoalError: see `shoal.Client.session`.
        """
        if limited := [it.path for it in variables if it.constraint is not None]:
            raise errors.InvalidVariable(
                f"the variable {limited[0]!r} has a constraint, which the servers do not know; make its layer without "
                "it",
                variable=limited[0],
            )
        super().build(variables)
        if self._session is not None or self._from_file:
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
            values = self.session.pull()
            for variable in variables:
                variable.assign(values[variable.path])
            self.iterations.assign(self.session.updates)
            before, self._shown = self._shown, _float32(self._spec.rate(self.session.updates))
            if float(keras.ops.convert_to_numpy(self.learning_rate)) == before:  # no callback has set another one
                self._learning_rate.assign(self._shown)

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
        """Keras calls it in each step, with the gradients that there are, and their variables in the same order."""
        session, variables = self.session, self._trainable_variables  # those of all workers
        paths = [it.path for it in trainable_variables]

        def exchange(rate: np.ndarray, *gradients: np.ndarray) -> list[Any]:
            given = dict(zip(paths, gradients, strict=True))
            own, samples = float(rate), self._options.get("batch_size")
            session.push(
                {it.path: given[it.path] if it.path in given else np.zeros(it.shape, it.dtype) for it in variables},
                metrics=self._metrics(),
                samples=samples,
                learning_rate=None if own == self._shown else own,
            )
            values = session.pull()
            if own == self._shown:
                own = self._shown = _float32(self._spec.rate(session.updates))
            return [np.float32(own), *(values[it.path] for it in variables)]

        operands = [keras.ops.convert_to_tensor(self.learning_rate, "float32"), *grads]
        rate, *values = call_on_host(exchange, operands, [_RATE, *variables])
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if isinstance(self._learning_rate, keras.Variable):  # a schedule of Keras computes its own
            self._learning_rate.assign(rate)

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
        """Returns what Keras stores with a model: the job's name and its learning rate. The servers have the rest."""
        return {"job": self._job, "learning_rate": self._shown}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "DistributedOptimizer":
        """Returns the optimizer of a model that Keras loads. It has no session, so it does not train."""
        del custom_objects
        found = cls(optim.SGD(config["learning_rate"]), job=config["job"])
        found._from_file = True
        return found


def _float32(rate: float) -> float:
    """Returns a learning rate as a variable of Keras has it."""
    return float(np.float32(rate))


__all__ = ["DistributedOptimizer"]

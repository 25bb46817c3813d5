"""Gradient tape over models, losses and arithmetic of their results. It does not differentiate other functions."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.tensor import Node, Record, Tensor, array_of, is_recorded, leaf, open_records
from shoal_distribute.strategies import get_strategy
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import namespace_of

F = TypeVar("F", bound=Callable[..., Any])


class GradientTape:
    """Records what models, losses and the operators of their tensors compute, and finds gradients.

        with GradientTape() as tape:
            loss = loss_object(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)

    It records calls of layers, models and losses, and of a `Tensor`'s operators, `sum` and `mean`. Other functions,
    such as those of NumPy, end the record: what they return is no `Tensor`.

    Args:
        persistent: whether `gradient` can be called more than once.
        watch_accessed_variables: accepted for TensorFlow's sake. It must be True: all trainable variables are watched.

    Raises:
        BadRequest: `watch_accessed_variables` is False.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent, self._used, self._record = persistent, False, Record()
        if not watch_accessed_variables:
            raise errors.BadRequest(
                "GradientTape(watch_accessed_variables=False) is not supported; name the variables in tape.gradient"
            )

    def watch(self, tensor: Any) -> None:
        """Makes a tensor a source that `gradient` can be asked for.

        Args:
            tensor: a `Tensor`, or a list of them. Variables are watched anyway.

        Raises:
            BadRequest: it is something else.
        """
        for each in tensor if isinstance(tensor, list | tuple) else [tensor]:
            if isinstance(each, Tensor):
                each.node = each.node if is_recorded(each) else leaf()
            elif not isinstance(each, DistributedVariable):
                raise errors.BadRequest(
                    f"a tape cannot watch a {type(each).__name__}; give keras.Tensor(array), and use that in the tape"
                )

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """Returns the gradients of a target with respect to sources.

        Args:
            target: a `Tensor` computed within the tape, such as a loss, or a list of them, whose sum counts. The
                elements of one that is not a scalar count as their sum.
            sources: variables or watched tensors: one, or a list, tuple or dict of them.
            output_gradients: weights of the target's elements, in its shape, instead of 1.

        Returns:
            A `Tensor` for each source, in the structure of the sources. None means that the target does not depend on
            the source.

        Raises:
            BadRequest: the target is no `Tensor`, or the tape was used before and is not persistent.
        """
        self._use()
        targets = list(target) if isinstance(target, list | tuple) else [target]
        weights = output_gradients if isinstance(target, list | tuple) else [output_gradients]
        backward = _BackwardPass(targets, weights or [None] * len(targets))
        while backward.advance():
            pass
        found = backward.gradients
        if not self._persistent:
            self._record.release()
        if isinstance(sources, dict):
            return {name: _of(source, found) for name, source in sources.items()}
        if isinstance(sources, list | tuple):
            return [_of(source, found) for source in sources]
        return _of(sources, found)

    @property
    def pullbacks(self) -> list[Callable[[Array], Sequence[Array | None]]]:
        """The pullbacks of the recorded steps. They hold the arrays that the backward pass needs."""
        return self._record.pullbacks

    def gradients_in_turn(
        self, target: Any, variables: Sequence[DistributedVariable]
    ) -> Iterator[tuple[Array | None, DistributedVariable]]:
        """Yields gradients and their variables while the backward pass goes on, from the last variable to the first.

        The order is always this one, so that all replicas and processes have the same. `Optimizer.minimize` uses it.

        Args:
            target: as for `gradient`.
            variables: the variables, in the order in which the model uses them. In another order, more of the backward
                pass is over before the first gradient comes.

        Raises:
            BadRequest: as for `gradient`.
        """
        self._use()
        backward = _BackwardPass([target], [None])
        try:
            for variable in reversed(variables):
                while backward.uses[id(variable)] and backward.advance():
                    pass
                yield backward.gradients.pop(id(variable), None), variable
        finally:
            if not self._persistent:
                self._record.release()

    def __enter__(self) -> "GradientTape":
        open_records().append(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        open_records().remove(self._record)

    def __del__(self) -> None:
        self._record.release()

    def _use(self) -> None:
        if self._used and not self._persistent:
            raise errors.BadRequest("this tape has given its gradients; use GradientTape(persistent=True) to ask again")
        self._used = True


class _BackwardPass:
    """The steps of a computation, followed back from its targets, one at a time.

    Args:
        targets: tensors.
        weights: the weights of each target's elements; None means 1.

    Attributes:
        gradients: the gradients of variables and nodes so far, by their ids.
        uses: by the id of a variable, the number of steps that may still add to its gradient.

    Raises:
        BadRequest: a target is no `Tensor`.
    """

    def __init__(self, targets: Sequence[Any], weights: Sequence[Any]) -> None:
        self.gradients: dict[int, Array] = {}
        self._heap: list[tuple[int, Node]] = []
        for target, weight in zip(targets, weights, strict=True):
            if not isinstance(target, Tensor):
                raise errors.BadRequest(
                    f"tape.gradient got a {type(target).__name__}, which no tape can follow back; the target must be a "
                    "Tensor that a model, a loss, or arithmetic of such tensors returned within the tape"
                )
            xp = namespace_of(target.array)
            self._add(
                target, xp.ones_like(target.array) if weight is None else xp.asarray(array_of(weight), target.dtype)
            )
        self.uses = _uses([node for _, node in self._heap])

    def advance(self) -> bool:
        """Follows back the next step. Returns False if there is none."""
        if not self._heap:
            return False
        _, node = heapq.heappop(self._heap)
        assert node.pull is not None
        pulled = node.pull(self.gradients[id(node)])
        if node.inputs:  # a watched leaf keeps its gradient
            del self.gradients[id(node)]
        for source, gradient in zip(node.inputs, pulled, strict=True):
            self._add(source, gradient)
            if isinstance(source, DistributedVariable):
                self.uses[id(source)] -= 1
        return True

    def _add(self, source: Tensor | DistributedVariable, gradient: Array | None) -> None:
        key = _key_of(source)
        if gradient is None or key is None:
            return
        if id(key) in self.gradients:
            self.gradients[id(key)] = self.gradients[id(key)] + gradient
            return
        self.gradients[id(key)] = gradient
        if isinstance(key, Node):
            heapq.heappush(self._heap, (-key.number, key))


def _key_of(source: Tensor | DistributedVariable) -> Node | DistributedVariable | None:
    """Returns what the gradient of an input belongs to; None if it leads no further back."""
    if isinstance(source, DistributedVariable):
        return source
    return source.node if is_recorded(source) else None


def _uses(nodes: Sequence[Node]) -> Counter[int]:
    """Returns, by the id of a variable, the number of steps that use it and lead to some nodes."""
    uses: Counter[int] = Counter()
    todo, seen = list(nodes), {id(node) for node in nodes}
    while todo:
        for source in todo.pop().inputs:
            key = _key_of(source)
            if isinstance(key, DistributedVariable):
                uses[id(key)] += 1
            elif key is not None and id(key) not in seen:
                seen.add(id(key))
                todo.append(key)
    return uses


def _of(source: Any, found: dict[int, Array]) -> Tensor | None:
    if not isinstance(source, Tensor | DistributedVariable):
        raise errors.BadRequest(
            f"tape.gradient cannot differentiate with respect to a {type(source).__name__}; the sources are "
            "variables, such as model.trainable_variables, or watched tensors"
        )
    gradient = found.get(id(source if isinstance(source, DistributedVariable) else source.node))
    return None if gradient is None else Tensor(gradient)


@overload
def function(func: F) -> F: ...


@overload
def function(func: None = None, **options: Any) -> Callable[[F], F]: ...


def function(func: Any = None, **options: Any) -> Any:
    """Returns the function itself: `tf.function` compiles a graph, but here each call computes at once.

    Args:
        func: the function. Without one, the result is a decorator.
        **options: accepted for TensorFlow's sake, and ignored.
    """
    del options
    return func if func is not None else (lambda decorated: decorated)


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Tensor:
    """Returns this replica's part of the mean loss: the sum of its samples' losses, divided by the global batch size.

    The sum of all replicas' parts is the mean over the global batch, and so is the sum of their gradients, which
    `apply_gradients` computes.

    Args:
        per_example_loss: losses of this replica's samples, [batch]: of a loss object with `reduction=None`.
        sample_weight: weights of the samples, [batch].
        global_batch_size: samples of all replicas. None means the samples of this replica times the number of replicas.

    Raises:
        BadRequest: the losses are one number for the whole batch.
    """
    losses = per_example_loss if isinstance(per_example_loss, Tensor) else Tensor(per_example_loss)
    if losses.ndim == 0:
        raise errors.BadRequest(
            "compute_average_loss got one number, but needs the loss of each sample; create the loss object with "
            "reduction=None"
        )
    count = global_batch_size or len(losses) * get_strategy().num_replicas_in_sync
    weighted = losses if sample_weight is None else losses * namespace_of(losses.array).asarray(sample_weight)
    return weighted.sum() / int(count)


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """Returns this replica's part of penalties: their sum, divided by the number of replicas.

    All replicas compute the same penalties of weights. So the sum of the parts is the penalty itself.

    Args:
        regularization_loss: one number, or a list of them, such as `model.losses`.
    """
    total = sum(regularization_loss) if isinstance(regularization_loss, list | tuple) else regularization_loss
    return (total if isinstance(total, Tensor) else Tensor(np.asarray(total))) / get_strategy().num_replicas_in_sync


__all__ = ["GradientTape", "compute_average_loss", "function", "scale_regularization_loss"]

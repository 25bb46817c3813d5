"""Tensors of a module by name, and the arrays of NumPy that share their memory."""

from collections.abc import Iterator, Mapping
from typing import Literal

import ml_dtypes
import numpy as np
import torch
from torch.nn.parameter import is_lazy

from shoal import errors
from shoal._system.logs import Log
from shoal.variables import Variable

_log = Log(__name__)

# How the buffers of all workers become one value; "local" keeps those of each worker.
BufferRule = Literal["mean", "last", "sum", "local"]
_BUFFER_RULES = ("mean", "last", "sum", "local")
# What `torch.compile` puts into the names of the parameters of the modules that it wraps.
_COMPILED = "_orig_mod."
# Names that an error lists.
_MAX_NAMED = 5


class ModelTensors:
    """The parameters and buffers of a module that are variables of a job, by their names in `state_dict`.

    A module of `torch.compile` has the names of the module that it wraps. A parameter that several modules share has
    its first name. A parameter that needs no gradient, and a buffer, is a variable that is not trained. Buffers of
    other dtypes than floats and int64, and those that are not in `state_dict`, stay with each worker.

    Args:
        model: the module.
        buffers: how the buffers of all workers become one value in a synchronous step; see `shoal.torch.session`.
            "mean" does not apply to int64 buffers, such as the counters of BatchNorm: they are "last".

    Raises:
        InvalidVariable: a parameter has no values, or is complex or sparse.
        BadRequest: the rule is unknown, or the model is no module.
    """

    def __init__(self, model: torch.nn.Module, buffers: BufferRule = "mean") -> None:
        if not isinstance(model, torch.nn.Module):
            raise errors.BadRequest(
                f"the model is {type(model).__module__}.{type(model).__name__}; give the module itself, such as model, "
                "not model.parameters()"
            )
        if buffers not in _BUFFER_RULES:
            raise errors.BadRequest(f"buffers is {buffers!r}; give one of {', '.join(map(repr, _BUFFER_RULES))}")
        self._model, self._rule = model, buffers
        self.parameters = named_parameters(model)
        self.trained = {name: it for name, it in self.parameters.items() if it.requires_grad}
        shared = [] if buffers == "local" else [(name, it) for name, it in _buffers(model) if _is_shared(it)]
        self._buffers = [name for name, _ in shared]
        self._pulled: dict[str, np.ndarray] = {}  # with "sum", the shared buffers of the last `load`
        for name, tensor in [*self.parameters.items(), *shared]:
            _check(name, tensor)
        self._zeros: dict[str, np.ndarray] = {}  # gradients of parameters that have none
        self._staging: dict[str, torch.Tensor] = {}  # pinned memory for tensors on GPUs
        self._gpus: set[torch.device] = set()
        self._versions: dict[str, int] = {}  # PyTorch's counts of the changes of the parameters, at the last `load`
        self._warned = False

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The shared buffers. A call such as `model.cuda()` puts others in their places."""
        now = {plain_name(name): it for name, it in self._model.named_buffers()} if self._buffers else {}
        return {name: now[name] for name in self._buffers}

    def variables(self) -> dict[str, Variable]:
        """Returns the variables of the job, with the present values of the module."""
        buffers = self.buffers
        arrays = {name: self._array(name, it) for name, it in [*self.parameters.items(), *buffers.items()]}
        self.finish_copies()
        # A push must have all variables of an aggregation, so frozen parameters have one that no buffer has.
        frozen: Literal["mean", "sum"] = "mean" if self._rule == "sum" else "sum"
        found = {
            name: Variable.of(arrays[name])
            if it.requires_grad
            else Variable.of(arrays[name], trainable=False, aggregation=frozen)
            for name, it in self.parameters.items()
        }
        for name, it in buffers.items():
            found[name] = Variable.of(arrays[name], trainable=False, aggregation=self._aggregation(it))
        self._keep_for_sums({name: arrays[name] for name in buffers})
        return found

    def _aggregation(self, buffer: torch.Tensor) -> Literal["mean", "last", "sum"]:
        if self._rule == "sum":
            return "sum"
        return "mean" if self._rule == "mean" and buffer.is_floating_point() else "last"

    def _keep_for_sums(self, buffers: Mapping[str, np.ndarray]) -> None:
        """Keeps values of the shared buffers, from which the changes are counted that a "sum" adds."""
        if self._rule == "sum":
            self._pulled = {name: it.copy() for name, it in buffers.items()}

    def check(self) -> None:
        """Checks that the gradients of the module can be pushed.

        Raises:
            BadRequest: no parameter has a gradient.
            InvalidVariable: the module has another parameter, or has lost one.
        """
        now = named_parameters(self._model)
        if now.keys() != self.parameters.keys() or any(now[name] is not it for name, it in self.parameters.items()):
            new = [name for name, it in now.items() if self.parameters.get(name) is not it]
            lost = [name for name in self.parameters if name not in now]
            raise errors.InvalidVariable(
                f"the module has other parameters than when the job began (new: {_shown(new)}; missing: "
                f"{_shown(lost)}); change the module before the optimizer or the session is made, and start another "
                "job for the changed module"
            )
        if frozen := [name for name, it in now.items() if it.requires_grad != (name in self.trained)]:
            raise errors.InvalidVariable(
                f"requires_grad of {_shown(frozen)} has changed since the job began, and a job trains the same "
                "variables to its end; set it before the optimizer or the session is made, and start a job of another "
                "name"
            )
        self._warn_of_lost_values()
        if all(it.grad is None for it in self.trained.values()):
            raise errors.BadRequest("no parameter has a gradient; call loss.backward() before each step")

    def _warn_of_lost_values(self) -> None:
        """Warns once if the module's values were changed in place since they were pulled, as by `load_state_dict`."""
        lost = [name for name, it in self.parameters.items() if it._version != self._versions.get(name, it._version)]
        if lost and not self._warned:
            self._warned = True
            _log.warning(
                "values of the module were changed, and the servers keep theirs: the next pull replaces them. Load "
                "values before the optimizer or the session is made, and do not change them between steps",
                changed=_shown(lost),
            )

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradients of all trained parameters. They share the memory of dense tensors on the CPU.

        A parameter without a gradient gets zeros, as in `DistributedDataParallel`.

        Raises:
            InvalidGradient: a gradient is sparse.
        """
        found = {name: self.gradient(name, it) for name, it in self.trained.items()}
        self.finish_copies()
        return found

    def gradient(self, name: str, parameter: torch.Tensor) -> np.ndarray:
        """Returns the gradient of one parameter; see `gradients`. One on a GPU is valid after `finish_copies`."""
        if parameter.grad is None:
            if name not in self._zeros:
                self._zeros[name] = np.zeros(parameter.shape, _dtype(parameter.dtype))
            return self._zeros[name]
        if parameter.grad.layout is not torch.strided:
            raise errors.InvalidGradient(
                f"the gradient of {name!r} is sparse; make its layer without sparse=True, such as "
                "torch.nn.Embedding(..., sparse=False)",
                variable=name,
            )
        return self._array(f"gradient of {name}", parameter.grad)

    def updates(self) -> dict[str, np.ndarray] | None:
        """Returns the values of the shared buffers, or with "sum", their changes; None if there are none."""
        found = {name: self._array(name, it) for name, it in self.buffers.items()}
        self.finish_copies()
        return {name: it - self._pulled[name] if self._pulled else it for name, it in found.items()} or None

    def load(self, values: Mapping[str, np.ndarray]) -> None:
        """Puts values into the module. A dense parameter on the CPU uses the memory of its array from now on.

        Args:
            values: new arrays, which nobody else changes, by name.
        """
        self.finish_copies()  # the pinned memory of the last values is used again
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if _can_take_memory(parameter):
                    parameter.data = to_tensor(values[name])
                else:
                    self._copy(name, values[name], parameter)
            for name, buffer in self.buffers.items():
                self._copy(name, values[name], buffer)
        self._keep_for_sums({name: values[name] for name in self._buffers})
        self._versions = {name: it._version for name, it in self.parameters.items()}

    def _copy(self, name: str, array: np.ndarray, target: torch.Tensor) -> None:
        source = to_tensor(array)
        if target.is_cuda:
            source = self._pinned(name, target).copy_(source)
        target.copy_(source, non_blocking=True)

    def _array(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """Returns an array with the values of a tensor. After copies from a GPU, call `finish_copies`."""
        tensor = tensor.detach()
        if tensor.is_cuda:
            tensor = self._pinned(name, tensor).copy_(tensor, non_blocking=True)
        return to_array(tensor)

    def _pinned(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns pinned memory for the values of a tensor on a GPU."""
        self._gpus.add(tensor.device)
        found = self._staging.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            found = self._staging[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return found

    def finish_copies(self) -> None:
        """Waits for the copies from and to GPUs."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)


def plain_name(name: str) -> str:
    """Returns the name of a parameter or buffer without what `torch.compile` adds."""
    return name.replace(_COMPILED, "")


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of a module by plain name. One that several modules share has its first name."""
    return {plain_name(name): it for name, it in model.named_parameters()}


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that `state_dict` has, each under its first plain name."""
    kept = model.state_dict(keep_vars=True)
    return ((plain_name(name), it) for name, it in model.named_buffers() if name in kept)


def _is_shared(buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and (buffer.is_floating_point() or buffer.dtype is torch.int64)


def _check(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        problem, advice = "has no shape yet", "call the module with one batch before"
    elif tensor.is_meta:
        problem, advice = "is on the meta device, so it has no values", "call model.to_empty(device='cpu') and fill it"
    elif tensor.is_complex():
        problem, advice = f"is {tensor.dtype}", "keep its real and imaginary parts, as torch.view_as_real gives them"
    elif tensor.layout is not torch.strided:
        problem, advice = "is sparse", "make it dense"
    else:
        return
    raise errors.InvalidVariable(f"{name!r} of the module {problem}; {advice}", variable=name)


def _dtype(dtype: torch.dtype) -> np.dtype:
    if dtype is torch.bfloat16:
        return np.dtype(ml_dtypes.bfloat16)
    return torch.empty(0, dtype=dtype).numpy().dtype


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Returns an array that shares the memory of a dense tensor on the CPU; otherwise a copy."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor that shares the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _can_take_memory(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter can use the memory of an array.

    Other memory would lose a layout such as channels_last, or be unknown to other processes.
    """
    return parameter.device.type == "cpu" and parameter.is_contiguous() and not parameter.is_shared()


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "") if names else "none"


__all__ = ["BufferRule", "ModelTensors", "named_parameters", "to_array", "to_tensor"]

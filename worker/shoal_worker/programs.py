"""Loading of a job's program, its variables and updates, and errors that name it. `shoal.program` defines programs."""

import copy
import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from shoal import errors, evaluation
from shoal._numerics import Aggregation
from shoal.consistency import Consistency
from shoal.data._reading import batches, prefetcher
from shoal.program import Array, Dataset, Program
from shoal.variables import Variable
from shoal_worker.allowed_programs import advice_on_missing
from shoal_worker.devices import Device, lacks_memory

# Sources of the frames between the training loop and the program.
_OURS = (str(Path(__file__).parent), prefetcher.__file__, batches.__file__, evaluation.__file__)

# Methods of every program.
_METHODS = ("variables", "loss_and_gradients")


def load_program(reference: str, settings: Mapping[str, Any]) -> Program:
    """Imports a program's module and calls its factory.

    Args:
        reference: package.module:factory.
        settings: keyword arguments of the factory.

    Raises:
        ProgramError: the module cannot be imported or has no such factory, the factory is neither a class of programs
            nor annotated as a function that returns one, the settings do not match its parameters, or it raises or
            does not return a program.
    """
    module_name, _, factory_name = reference.partition(":")
    if not module_name or not factory_name:
        raise errors.ProgramError(f"program {reference!r} must have the form package.module:factory", program=reference)
    factory = _find_factory(reference, _import(reference, module_name), factory_name)
    _check_factory(f"program {reference}: {factory_name}", factory)
    _check_settings(reference, factory, settings)
    with as_program_error(f"program {reference}: the factory"):
        program = factory(**settings)
    return _checked(reference, program)


def summed(
    variables: Mapping[str, Variable | np.ndarray], consistency: Consistency
) -> Mapping[str, Variable | np.ndarray]:
    """Returns variables with the aggregation "sum" instead of "mean", in modes that need it: see `Increments`.

    Args:
        variables: the program's variables, by name.
        consistency: the mode.
    """
    found = dict(variables)
    if consistency.joins_gradients:
        return found
    for name, variable in variables.items():
        if isinstance(variable, Variable) and variable.aggregation is Aggregation.MEAN:
            found[name] = changed = copy.copy(variable)
            object.__setattr__(changed, "aggregation", Aggregation.SUM)  # the class is frozen
    return found


class Increments:
    """Averaged variables as increments, for modes that apply the pushes of the workers one by one.

    If workers pushed values instead, these would replace each other, with what the others have added in between. Each
    worker adds its change, divided by the number of workers. So one push of each worker changes a variable about as
    much as one synchronous step, which assigns the mean. Late pushes do not add up to more.

    Args:
        variables: the program's variables, by name.
        placed: the variables of the job. Those that it adds up, but the program averages, get increments.
        workers: number of workers that the job asks for.
    """

    def __init__(
        self, variables: Mapping[str, Variable | np.ndarray], placed: Mapping[str, Variable], workers: int
    ) -> None:
        own = {name: it.aggregation for name, it in variables.items() if isinstance(it, Variable)}
        added = {name for name, it in placed.items() if it.aggregation is Aggregation.SUM}
        self._averaged = {name for name in added if own.get(name) is Aggregation.MEAN}
        self._added, self._workers = added - self._averaged, workers

    def of(self, updates: Mapping[str, Array], params: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns the updates of a step, with increments for averaged variables.

        A push carries all sums or none. So if the program gives values of one aggregation only, the other ones are 0.

        Args:
            updates: the updates that the program has returned.
            params: the variables that it was given.
        """
        if not self._averaged:
            return updates
        found = dict(updates)
        for name in self._averaged & found.keys():
            old, new = params[name], found[name]
            if getattr(new, "shape", None) == old.shape:  # otherwise the push names the mistake
                found[name] = (new - old) / self._workers
        for given, others in ((self._averaged, self._added), (self._added, self._averaged)):
            if given & updates.keys() and not others & updates.keys():
                found |= {name: params[name] * 0 for name in others}
        return found


@contextmanager
def as_program_error(what: str) -> Iterator[None]:
    """Raises ProgramError for any error in the block, with the part of the traceback inside the program.

    Args:
        what: begins the message, such as "program a.b:c: loss_and_gradients, step 7,".
    """
    try:
        yield
    except errors.ProgramError:  # raised by the worker itself
        raise
    except (Exception, SystemExit) as error:
        raise errors.ProgramError(f"{what} raised {type(error).__name__}: {error}{_program_trace(error)}") from None


@contextmanager
def as_program_or_memory_error(what: str, where: str) -> Iterator[None]:
    """Combines `as_program_error` and `as_out_of_memory_error`."""
    with as_program_error(what), as_out_of_memory_error(what, where):
        yield


def computing_on(device: Device, batch_size: int) -> str:
    """Describes the device and the batch for `as_out_of_memory_error`; a batch size of 0 is left out."""
    return device.name + (f", with a batch of {batch_size} samples" if batch_size else "")


@contextmanager
def as_out_of_memory_error(what: str, where: str) -> Iterator[None]:
    """Raises ProgramError with advice if the block runs out of memory, on the host or on a device.

    Args:
        what: begins the message, as for `as_program_error`.
        where: the device and the batch, such as "cuda:0 NVIDIA H200, with a batch of 64 samples".
    """
    try:
        yield
    except errors.ShoalError:  # has its message already
        raise
    except Exception as error:
        if not lacks_memory(error):
            raise
        asked = f": {error}" if str(error) else ""  # NumPy and CuPy give the requested size; Python gives no text
        raise errors.ProgramError(
            f"{what} ran out of memory on {where}{asked}. Reduce the job's batch_size or the model; on a GPU, also "
            f"check --device-memory-limit of shoal worker and other processes on that GPU{_program_trace(error)}"
        ) from None


def _program_trace(error: BaseException) -> str:
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list([*dropwhile(_is_ours, list(trace.stack))])
    if not trace.stack and not isinstance(error, SyntaxError):  # raised before any frame of the program
        return ""
    lines = trace.format() if trace.stack else trace.format_exception_only()
    return "\n" + "".join(lines).rstrip()


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OURS) or "importlib" in frame.filename


def _import(reference: str, name: str) -> ModuleType:
    try:
        with as_program_error(f"program {reference}: importing {name}"):
            return importlib.import_module(name)
    except errors.ProgramError as error:
        missing = (f"ModuleNotFoundError: No module named {each!r}" for each in (name.partition(".")[0], name))
        if not any(each in error.message for each in missing):
            raise
        raise errors.ProgramError(
            f"{error.message}\nThe first folder searched for modules is {sys.path[0]!r} (--path of shoal worker); "
            f"{advice_on_missing(reference)}"
        ) from None


def _find_factory(reference: str, module: ModuleType, name: str) -> Callable[..., Any]:
    factory: Callable[..., Any] | None = getattr(module, name, None)
    if callable(factory):
        return factory
    if factory is not None:
        raise errors.ProgramError(f"program {reference}: {name} must be a function, not {type(factory).__name__}")
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, public, n=3, cutoff=0.5) or sorted(public)[:5]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise errors.ProgramError(f"program {reference}: {module.__file__} has no {name}{hint}", program=reference)


def _check_factory(what: str, factory: Callable[..., Any]) -> None:
    """Checks that a callable is a program's factory, before it is called: a job can name any callable of a module.

    Args:
        what: begins the message.
        factory: the callable.

    Raises:
        ProgramError: it is neither a class with the methods of a program, nor a function annotated to return one.
    """
    if inspect.isclass(factory):
        if missing := _missing_methods(factory):
            raise errors.ProgramError(f"{what} is a class that has no method {missing[0]}(); see shoal.Program")
        return
    function = inspect.unwrap(factory)
    if not inspect.isfunction(function):
        raise errors.ProgramError(
            f"{what} is a {type(function).__name__}, which is not called; name a class of programs, or a function with "
            "the annotation `-> shoal.Program`"
        )
    kind = _returned_type(what, function)
    if not _is_program_type(kind):
        given = "has no annotation" if kind is None else f"is annotated with {_type_name(kind)}, which is no program"
        raise errors.ProgramError(
            f"{what}() {given}, so it is not called; if it returns a program, write "
            f"`def {function.__name__}(...) -> shoal.Program:`, or give the program's own class"
        )


def _returned_type(what: str, function: FunctionType) -> Any:
    """Returns the annotation of what a function returns; None without one."""
    annotation = function.__annotations__.get("return")
    if annotation is None:
        return None
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"return": annotation}), function.__globals__)["return"]
    except Exception as error:
        raise errors.ProgramError(
            f"{what}() has the annotation {annotation!r}, which cannot be resolved ({type(error).__name__}: {error}); "
            "import that class outside `if TYPE_CHECKING`, or write `-> shoal.Program`"
        ) from None


def _is_program_type(kind: Any) -> bool:
    if get_origin(kind) in {Union, UnionType}:
        return all(_is_program_type(each) for each in get_args(kind))
    kind = get_origin(kind) or kind  # the class of a generic alias
    return inspect.isclass(kind) and not _missing_methods(kind)


def _missing_methods(kind: type) -> list[str]:
    return [method for method in _METHODS if not callable(getattr(kind, method, None))]


def _type_name(kind: Any) -> str:
    return kind.__name__ if inspect.isclass(kind) else str(kind)


def _check_settings(reference: str, factory: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some built-in callables have no signature; the call itself will raise
        return
    try:
        signature.bind(**settings)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "none"
        raise errors.ProgramError(
            f"program {reference}: the settings do not match the factory: {error}; "
            f"the factory is {factory.__name__}{signature}, and the settings are {given}",
            program=reference,
        ) from None


def _checked(reference: str, program: Any) -> Program:
    what = f"program {reference}: the factory returned a {type(program).__name__}"
    for method in _METHODS:
        if not callable(getattr(program, method, None)):
            raise errors.ProgramError(f"{what}, which has no method {method}(); see shoal.Program")
    with as_program_error(f"program {reference}: `dataset`"):
        has_dataset = hasattr(program, "dataset")
        dataset = program.dataset if has_dataset else None
    if not has_dataset:
        raise errors.ProgramError(
            f"{what}, which has no attribute `dataset`; set it to None if the program makes its own batches"
        )
    if dataset is not None and not isinstance(dataset, Dataset):
        raise errors.ProgramError(
            f"{what}, whose `dataset` is a {type(dataset).__name__} without __len__ and batch(indices)"
        )
    checked: Program = program
    return checked


__all__ = [
    "Increments",
    "as_out_of_memory_error",
    "as_program_error",
    "as_program_or_memory_error",
    "computing_on",
    "load_program",
    "summed",
]

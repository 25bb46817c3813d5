"""Loading of a job's program, and errors that name it. `shoal.program` defines what a program is."""

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

from shoal import errors, evaluation
from shoal.data._reading import batches, prefetcher
from shoal.program import Dataset, Program
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


__all__ = ["as_out_of_memory_error", "as_program_error", "as_program_or_memory_error", "computing_on", "load_program"]

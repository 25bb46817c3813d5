"""Trees of arrays: nested dicts, lists, tuples, named tuples and JAX pytrees, flattened to arrays by key path. Pure.

A leaf at `tree["layers"][0]["w"]` has the name "layers/0/w". A list of numbers of Python or NumPy, or of such lists,
is one leaf: an array. Containers that only JAX knows, such as the state of Flax's nnx modules, are opened with
`jax.tree_util` if the user's process has loaded JAX. This module never imports JAX.
"""

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors

SEPARATOR = "/"
# Levels of a tree. The limit is below Python's own limit of nested calls.
MAX_DEPTH = 100
MAX_DIMENSIONS = 64  # of an array of NumPy
MAX_NAMED = 10  # names that an error lists
# Keys of JAX by which a box of one array names its content, such as nnx.Param. They add nothing to a key path.
_BOXED = frozenset({"value", "raw_value", 0})

_Build = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class _Leaf:
    name: str


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A None in the tree: a place without an array."""


@dataclass(frozen=True, slots=True)
class _Branch:
    children: tuple["_Node", ...]
    build: _Build  # returns the container, given its children


_Node = _Leaf | _Nothing | _Branch


class _Index(int):
    """The index of a part of a list or tuple, in contrast to a key that is a number."""


_BOX = object()  # the key of the content of a box of one array


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a container.

    Attributes:
        keys: by child, its key, in the order of the children.
        children: the children.
        build: returns the container, given its children.
        of_jax: whether only JAX knows the container. Its dicts may have keys of any type.
    """

    keys: Sequence[Any]
    children: Sequence[Any]
    build: _Build
    of_jax: bool = False

    @staticmethod
    def shown(key: Any) -> str:
        """Returns a key as messages show it."""
        return "" if key is _BOX else f"[{key!r}]"


class Structure:
    """The structure of a tree: its containers and the names of its leaves, without the leaves.

    Attributes:
        kind: the class of the outermost container.
        flat: whether the tree is a dict of leaves. It needs no rebuilding from values in its order.
    """

    def __init__(self, root: _Node, kind: type, names: list[str]) -> None:
        self._root, self.kind, self._names = root, kind, names
        leaves = isinstance(root, _Branch) and all(isinstance(child, _Leaf) for child in root.children)
        self.flat = leaves and kind is dict

    def rebuilt(self, values: Mapping[str, Any]) -> Any:
        """Returns a tree of this structure.

        Args:
            values: the leaves by name.
        """
        return values if self.flat and [*values] == self._names else _rebuilt(self._root, values)


def _rebuilt(node: _Node, values: Mapping[str, Any]) -> Any:
    match node:
        case _Leaf(name):
            return values[name]
        case _Branch(children, build):
            return build([_rebuilt(child, values) for child in children])
    return None


def is_container(tree: object) -> bool:
    """Returns whether a value is a container, not a leaf."""
    return tree is not None and _parts(tree) is not None


def flatten(
    tree: Any,
    what: str,
    error: type[errors.ShoalError],
    *,
    none_is_leaf: bool = False,
    known: Collection[str] = (),
    no_empty_lists: bool = False,
) -> tuple[dict[str, Any], Structure]:
    """Returns the leaves of a tree by name, in its order, and its structure.

    Args:
        tree: a container.
        what: name of the tree in messages, such as "gradients".
        error: class of the errors.
        none_is_leaf: whether None is a leaf. Otherwise it is a place without an array.
        known: names of the variables that the leaves belong to. If each number of a list has a variable of its own, the
            list is not one array.
        no_empty_lists: whether an empty list is refused, because it would be left out. Trees of JAX may have some.

    Returns:
        The leaves, and the structure.

    Raises:
        ShoalError: of class `error`: a key is not a string, two leaves have the same name, or the tree contains itself
            or is nested too deeply. The message names the place.
    """
    walk = _Walk(what, error, none_is_leaf, known, no_empty_lists)
    root = walk.node(tree, "", what, (), of_jax=False)
    return walk.leaves, Structure(root, type(tree), [*walk.leaves])


def unflatten(values: Mapping[str, Any], like: Any) -> Any:
    """Returns values by name as a tree, such as what `Client.pull` and `Checkpoints.read` return.

        params = shoal.unflatten(shoal.Checkpoints("ckpt").read("mlp"), like=params)

    Args:
        values: the leaves by name. The leaf at `tree["layers"][0]["w"]` has the name "layers/0/w".
        like: a tree with the structure of the result: dicts, lists, tuples, named tuples, and containers that JAX knows
            if JAX is loaded. Its leaves are not used, so they may be arrays, `Variable`s or anything else.

    Returns:
        A new tree with the structure of `like`. Its leaves are the given objects, which are not copied or checked. A
        None in `like` stays None.

    Raises:
        BadRequest: `like` is not a container or cannot be a tree of variables, or its names are not those of `values`.
            The message lists the differences.
    """
    if not is_container(like):
        raise errors.BadRequest(
            f"like is a {type(like).__name__}; give the tree whose structure the values have, such as the variables of "
            "the session"
        )
    leaves, structure = flatten(like, "like", errors.BadRequest)
    missing, unknown = leaves.keys() - values.keys(), values.keys() - leaves.keys()
    if missing or unknown:
        lacking = f"the values lack {_first_names(missing)}" if missing else ""
        more = f"like lacks {_first_names(unknown)}" if unknown else ""
        raise errors.BadRequest(
            f"{' and '.join(filter(None, (lacking, more)))}; give a tree with the names of the values, such as the "
            "variables of the session"
        )
    return structure.rebuilt({name: values[name] for name in leaves})


def _first_names(names: Iterable[str]) -> str:
    shown = [repr(name) for name in sorted(names)]
    more = len(shown) - MAX_NAMED
    return ", ".join(shown[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")


class _Walk:
    """One walk over a tree, which collects its leaves."""

    def __init__(
        self,
        what: str,
        error: type[errors.ShoalError],
        none_is_leaf: bool,
        known: Collection[str],
        no_empty_lists: bool,
    ) -> None:
        self._what, self._error, self._none_is_leaf, self._known = what, error, none_is_leaf, known
        self._no_empty_lists = no_empty_lists
        self.leaves: dict[str, Any] = {}
        self._places: dict[str, str] = {}  # by name, where the leaf is

    def node(self, tree: Any, name: str, place: str, above: tuple[int, ...], *, of_jax: bool) -> _Node:
        """Returns the node of a part of the tree; `of_jax` means that a container around it is one of JAX's."""
        if tree is None and not self._none_is_leaf:
            return _Nothing()
        # Asked of lists alone, because each push walks over all of its arrays.
        apart = isinstance(tree, list | tuple) and _joined(name, "0") in self._known
        found = None if tree is None else _parts(tree, apart=apart)
        if found is None:
            return self._leaf(tree, name, place)
        if id(tree) in above:
            raise self._error(f"{place} contains itself; give a tree without cycles")
        if len(above) >= MAX_DEPTH:
            raise self._error(f"{place[:200]}... is nested deeper than {MAX_DEPTH} levels; give a flatter tree")
        of_jax = of_jax or found.of_jax
        if not of_jax:
            self._check_keys(found.keys, place)
            if self._no_empty_lists and type(tree) is list and not tree:
                raise self._error(f"{place} is an empty list; give an array, such as np.zeros(3), or leave it out")
        inside = (*above, id(tree))
        children = [
            self.node(
                child, _joined(name, "" if key is _BOX else str(key)), place + found.shown(key), inside, of_jax=of_jax
            )
            for key, child in zip(found.keys, found.children, strict=True)
        ]
        return _Branch(tuple(children), found.build)

    def _check_keys(self, keys: Iterable[Any], place: str) -> None:
        for key in keys:
            if not isinstance(key, str | _Index):
                raise self._error(
                    f"{place} has the key {key!r:.100}, a {type(key).__name__}; the keys of a dict must be strings, "
                    f"because they name variables: use {str(key)!r:.100}, or a list"
                )

    def _leaf(self, value: Any, name: str, place: str) -> _Leaf:
        if name in self._places:
            raise self._error(
                f"{self._places[name]} and {place} would both be the variable {name!r}; rename one of them",
                variable=name[:255],
            )
        self._places[name], self.leaves[name] = place, value
        return _Leaf(name)


def _joined(name: str, key: str) -> str:
    return f"{name}{SEPARATOR}{key}" if name and key else name or key


def _parts(tree: Any, *, apart: bool = False) -> _Parts | None:
    """Returns the parts of a container; None if the value is a leaf.

    Args:
        tree: the value.
        apart: whether a list of numbers is a container. Otherwise it is one array.
    """
    kind = type(tree)
    if kind is dict:
        return _parts_of_mapping(tree)
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return _Parts(kind._fields, tree, lambda children: kind(*children))
    if kind is list or kind is tuple:
        is_array = tree and not apart and _has_numbers_only(tree)
        return None if is_array else _Parts([*map(_Index, range(len(tree)))], tree, kind)
    registered = _parts_of_registered(tree)
    return _parts_of_mapping(tree) if registered is None and isinstance(tree, Mapping) else registered


def _has_numbers_only(values: Sequence[Any], levels: int = MAX_DIMENSIONS) -> bool:
    """Returns whether a list or tuple has only numbers, or lists of them: it is then one array."""
    return levels > 0 and all(
        isinstance(it, int | float | complex | np.number | np.bool_)
        or (type(it) in (list, tuple) and _has_numbers_only(it, levels - 1))
        for it in values
    )


def _parts_of_mapping(tree: Mapping[Any, Any]) -> _Parts:
    keys, children = list(tree), list(tree.values())
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return _Parts(keys, children, lambda found: dict(zip(keys, found, strict=True)))
    template = copy.copy(tree)  # keeps what a subclass adds, such as a default factory
    for key in keys:
        template[key] = None  # but not the arrays

    def build(found: Sequence[Any]) -> Any:
        made = copy.copy(template)
        made.update(zip(keys, found, strict=True))
        return made

    return _Parts(keys, children, build)


def _parts_of_registered(tree: Any) -> _Parts | None:
    """Returns the parts of a container that is registered with JAX; None if there is no such container, or no JAX."""
    jax = sys.modules.get("jax")
    if jax is None or isinstance(tree, jax.Array):
        return None
    found, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if any(not path for path, _ in found):  # the value itself
        return None
    keys = [_key_of(path[0]) for path, _ in found]
    if len(keys) == 1 and keys[0] in _BOXED and not isinstance(tree, Mapping):
        keys = [_BOX]
    return _Parts(keys, [child for _, child in found], definition.unflatten, of_jax=True)


def _key_of(entry: Any) -> Any:
    """Returns the key in an entry of a key path of JAX."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


__all__ = ["MAX_DEPTH", "MAX_NAMED", "SEPARATOR", "Structure", "flatten", "is_container", "unflatten"]

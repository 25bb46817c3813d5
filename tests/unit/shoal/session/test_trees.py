"""Trees of arrays: what comes out has the structure of what went in, and every refusal names the place."""

import sys
from collections import OrderedDict, defaultdict
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import shoal
from shoal import errors
from shoal._session import trees


class Layer(NamedTuple):
    kernel: Any
    bias: Any


KEYS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=5)
# Leaves are strings here: a tree does not look into them.
LEAVES = st.text(max_size=3) | st.none()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.builds(Layer, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
    )


TREES = containers(st.recursive(LEAVES, containers, max_leaves=12))


def types_of(tree: Any) -> Any:
    """Returns the tree with the type of each container."""
    if isinstance(tree, dict):
        return type(tree), [(key, types_of(child)) for key, child in tree.items()]
    return (type(tree), [types_of(child) for child in tree]) if isinstance(tree, list | tuple) else type(tree)


@given(TREES)
def test_a_tree_is_rebuilt_from_its_leaves(tree: Any) -> None:
    leaves, structure = trees.flatten(tree, "tree", errors.InvalidVariable)
    rebuilt = structure.rebuilt(leaves)
    assert rebuilt == tree
    assert types_of(rebuilt) == types_of(tree)
    assert None not in leaves.values()


@given(TREES)
def test_values_by_name_become_a_tree_like_another(tree: Any) -> None:
    leaves, _ = trees.flatten(tree, "tree", errors.InvalidVariable)
    assume(trees.is_container(tree))  # [[]] is an array
    made = shoal.unflatten(dict(reversed(leaves.items())), like=tree)
    assert made == tree
    assert types_of(made) == types_of(tree)
    assert list(trees.flatten(made, "made", errors.InvalidVariable)[0]) == list(leaves)


def test_names_that_differ_from_those_of_the_tree_are_refused() -> None:
    like = {"layer1": {"w": 0, "b": 0}, "none": None}
    assert shoal.unflatten({"layer1/b": 1, "layer1/w": 2}, like=like) == {"layer1": {"w": 2, "b": 1}, "none": None}
    with pytest.raises(errors.BadRequest, match=r"^the values lack 'layer1/b'; give a tree with the names"):
        shoal.unflatten({"layer1/w": 2}, like=like)
    with pytest.raises(errors.BadRequest, match=r"^the values lack 'layer1/b', 'layer1/w' and like lacks 'w'; "):
        shoal.unflatten({"w": 2}, like=like)
    with pytest.raises(errors.BadRequest, match=r"'v18', 'v19' and 5 more; "):
        shoal.unflatten({}, like={f"v{n}": 0 for n in range(10, 25)})
    with pytest.raises(errors.BadRequest, match=r"^like is a ndarray; give the tree"):
        shoal.unflatten({"w": 2}, like=np.zeros(3))
    with pytest.raises(errors.BadRequest, match="the keys of a dict must be strings"):
        shoal.unflatten({"1": 2}, like={1: 0})


@given(TREES)
def test_a_none_is_a_leaf_if_asked_for(tree: Any) -> None:
    with_none, structure = trees.flatten(tree, "tree", errors.InvalidVariable, none_is_leaf=True)
    without, _ = trees.flatten(tree, "tree", errors.InvalidVariable)
    assert without == {name: leaf for name, leaf in with_none.items() if leaf is not None}
    assert structure.rebuilt(with_none) == tree


def test_names_are_key_paths() -> None:
    tree = {"layers": [{"w": 1, "b": 2}, Layer(3, ("x",))], "scale": 5}
    leaves, _ = trees.flatten(tree, "tree", errors.InvalidVariable)
    assert leaves == {"layers/0/w": 1, "layers/0/b": 2, "layers/1/kernel": 3, "layers/1/bias/0": "x", "scale": 5}


def test_a_list_of_numbers_is_one_array() -> None:
    tree = {"w": [1, 2.0], "m": ((1, 2), [3, 4]), "n": [], "flags": [True, np.False_], "z": [1j, 2]}
    leaves, _ = trees.flatten(tree, "tree", errors.InvalidVariable)
    assert leaves == {name: value for name, value in tree.items() if name != "n"}


def test_a_dict_of_arrays_is_not_rebuilt() -> None:
    values = {"w": np.zeros(3)}
    _, structure = trees.flatten({"w": 1}, "tree", errors.InvalidVariable)
    assert structure.rebuilt(values) is values


def test_a_dict_of_arrays_in_another_order_takes_that_of_the_tree() -> None:
    _, structure = trees.flatten({"w": 1, "b": 2}, "tree", errors.InvalidVariable)
    assert [*structure.rebuilt({"b": 0, "w": 0})] == ["w", "b"]


def test_other_mappings_are_kept_where_they_can_be() -> None:
    tree = defaultdict(list, a=1, b=MappingProxyType({"c": 2}))
    leaves, structure = trees.flatten(tree, "tree", errors.InvalidVariable)
    rebuilt = structure.rebuilt(leaves)
    assert type(rebuilt) is defaultdict
    assert rebuilt["new"] == []
    assert rebuilt["b"] == {"c": 2}
    assert tree == {"a": 1, "b": {"c": 2}}, "the tree of the user is unchanged"


def cycle() -> Any:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["up"] = [tree]
    return tree


def cyclic_list() -> Any:
    tree: list[Any] = []
    tree.append(tree)
    return tree


def deep() -> Any:
    tree: Any = 1
    for _ in range(trees.MAX_DEPTH + 1):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {3: 1}}, r"tree\['a'\] has the key 3, a int; the keys of a dict must be strings"),
        ({b"a": 1}, r"tree has the key b'a', a bytes; .* use \"b'a'\""),
        ({None: 1}, "tree has the key None, a NoneType"),
        ({"a/b": 1, "a": {"b": 2}}, r"tree\['a/b'\] and tree\['a'\]\['b'\] would both be the variable 'a/b'; rename"),
        ({"a": ["x"], "a/0": 1}, r"tree\['a'\]\[0\] and tree\['a/0'\] would both be the variable 'a/0'"),
        (cycle(), r"tree\['a'\]\['up'\]\[0\] contains itself"),
        (cyclic_list(), r"tree\[0\] contains itself"),
        (deep(), "is nested deeper than 100 levels"),
    ],
)
def test_a_refusal_names_the_place(tree: Any, message: str) -> None:
    with pytest.raises(errors.InvalidGradient, match=message):
        trees.flatten(tree, "tree", errors.InvalidGradient)


def test_the_same_array_may_be_in_two_places() -> None:
    shared = {"w": 1}
    assert trees.flatten([shared, shared], "tree", errors.InvalidVariable)[0] == {"0/w": 1, "1/w": 1}


class State:
    """A container that only JAX knows, as nnx.State is."""

    def __init__(self, parts: dict[Any, Any]) -> None:
        self.parts = parts


class Box:
    """A container of one array, as nnx.Param is."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FakeTreeUtil:
    """The two functions of jax.tree_util that are used, for `State` and `Box`."""

    @staticmethod
    def tree_flatten_with_path(tree: Any, is_leaf: Any) -> Any:
        assert not is_leaf(tree)
        if isinstance(tree, State):
            parts = [((SimpleNamespace(key=key),), child) for key, child in tree.parts.items()]
            keys = list(tree.parts)
            return parts, SimpleNamespace(unflatten=lambda children: State(dict(zip(keys, children, strict=True))))
        if isinstance(tree, Box):
            return [((SimpleNamespace(name="value"),), tree.value)], SimpleNamespace(unflatten=lambda it: Box(it[0]))
        return [((), tree)], None


def test_containers_of_jax_are_opened_if_jax_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    jax: Any = ModuleType("jax")
    jax.tree_util, jax.Array = FakeTreeUtil, np.matrix
    monkeypatch.setitem(sys.modules, "jax", jax)
    tree = State({0: {1: {"kernel": Box(1.0)}}, "scale": Box(2.0)})
    leaves, structure = trees.flatten(tree, "tree", errors.InvalidVariable)
    assert leaves == {"0/1/kernel": 1.0, "scale": 2.0}
    rebuilt = structure.rebuilt({"0/1/kernel": 3.0, "scale": 4.0})
    assert isinstance(rebuilt, State)
    assert rebuilt.parts[0][1]["kernel"].value == 3.0
    assert rebuilt.parts["scale"].value == 4.0

"""Trees of arrays, such as batches, walked without JAX.

Why: docs/decisions/data.md#trees
A tree is a dictionary, list, tuple, named tuple or dataclass of trees, None, a leaf, or
what is registered with JAX, by a program that imports it.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# What JAX need not be asked about.
PLAIN = {list, tuple, type(None), np.ndarray, np.memmap, str, bytes, bool, int, float}


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Maps `function(path, leaf)` over the leaves; paths are as `inputs/tokens`."""
    branch = lambda name, x: map_leaves(function, x, f"{path}/{name}".lstrip("/"))  # noqa: E731
    if type(tree) is dict:
        return {name: branch(name, inner) for name, inner in tree.items()}
    if type(tree) not in PLAIN and (node := _registered(tree)):
        names, branches, join = node
        return join([*map(branch, names, branches)])
    kinds = Mapping | list | tuple | None
    is_tree = isinstance(tree, kinds) or dataclasses.is_dataclass(tree)
    return _mapped(branch, tree) if is_tree else function(path, tree)


def _registered(tree: Any) -> Any:
    """Names, branches and the way back of a tree that JAX knows; None for others.

    Mappings become dictionaries, as which they are batches, and chex's dataclasses not.
    """
    is_mapping = isinstance(tree, Mapping) and not dataclasses.is_dataclass(tree)
    jax = sys.modules.get("jax")
    if is_mapping or not hasattr(jax, "tree_util"):
        return None
    one_level = lambda x: x is not tree  # noqa: E731
    branches, kind = jax.tree_util.tree_flatten_with_path(tree, one_level)
    paths = [keys for keys, _ in branches]
    if paths == [()]:  # A leaf.
        return None
    names = [jax.tree_util.keystr(keys, simple=True) for keys in paths]
    return names, [x for _, x in branches], kind.unflatten


def _mapped(branch: Callable[[Any, Any], Any], tree: Any) -> Any:
    """Maps `branch(name, tree)` over the branches of a tree that is no plain `dict`."""
    if tree is None:
        return None
    if dataclasses.is_dataclass(tree):  # chex's are mappings, too.
        # Static fields are none to JAX; to Flax, those with `pytree_node=False`.
        fields = [f for f in dataclasses.fields(tree) if not f.metadata.get("static")]
        names = [f.name for f in fields if f.metadata.get("pytree_node", True)]
        branches = {name: branch(name, getattr(tree, name)) for name in names}
        return dataclasses.replace(tree, **branches)
    if isinstance(tree, Mapping):
        return {name: branch(name, inner) for name, inner in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(branch, tree._fields, tree))
    return type(tree)(branch(i, inner) for i, inner in enumerate(tree))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by path, "" for one that is a leaf itself."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.setdefault, tree)  # Which returns the leaf.
    return leaves


def count_rows(tree: Any) -> int:
    """Rows N of the arrays [N, ...] of a tree, which all have as many."""
    return len(next(iter(leaves_by_path(tree).values())))


def nested(leaves: Mapping[str, Any]) -> Any:
    """Makes a tree of its leaves by path; one of the names 0, 1, ... is a tuple."""
    branches: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        name, _, inner = path.partition("/")
        branches.setdefault(name, {})[inner] = leaf
    tree = {
        name: inner[""] if [*inner] == [""] else nested(inner)
        for name, inner in branches.items()
    }
    places = [*map(str, range(len(tree)))]
    return tuple(tree[i] for i in places) if tree.keys() == {*places} else tree


def described(value: Any) -> str:
    """Describes a value in a line, such as `ArrayDataset(inputs=float32 [500, 8])`.

    Arrays have their shape, functions their name, and objects that of their type.
    """
    if isinstance(value, str | int | float | None):
        return repr(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {[*value.shape]}"
    name, fields = getattr(value, "__qualname__", type(value).__name__), None
    if isinstance(value, Mapping):
        name, fields = type(value).__name__, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if fields is None:
        return name
    return f"{name}({', '.join(f'{k}={described(x)}' for k, x in fields.items())})"

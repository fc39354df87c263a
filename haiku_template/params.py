"""Haiku parameters by path: `gpt/block_0/attention/qkv/w` is module and name."""

import dataclasses
import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import haiku as hk
import jax
import numpy as np

# Of `hk.data_structures.to_immutable_dict`, as published code calls it.
IMMUTABLE = type(hk.data_structures.to_immutable_dict({}))


# Why: docs/decisions/house.md#paths
def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves of any tree by path, in simple form: `mlp/w`."""
    return leaves_by_path(tree, is_leaf, simple=True, separator="/")


def unflatten(leaves: dict[str, Any]) -> hk.Params:
    """Inverse of `flatten` for Haiku's parameters."""
    params: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        module, _, name = path.rpartition("/")
        params.setdefault(module, {})[name] = leaf
    return params


def leaves_by_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, **form: Any
) -> dict[str, Any]:
    """Leaves of any tree by path, `['mlp']['w']` as `jax.tree_util.keystr` has it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {jax.tree_util.keystr(path, **form): leaf for path, leaf in leaves}


def matching(pattern: str, paths: Iterable[str]) -> set[str]:
    """Selects paths by a shell pattern: `*` is anything, slashes too."""
    pattern = pattern.replace("[^", "[!")  # Another way to write it in a shell.
    return {path for path in paths if fnmatch.fnmatchcase(path, pattern)}


def path_of(keys: Any) -> str:
    """Path of a leaf in simple form, as `flatten` has it."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def in_dictionaries(tree: Any) -> Any:
    """Converts named tuples and registered classes, for formats without them."""
    one_level = jax.tree_util.tree_flatten_with_path(tree, lambda x: x is not tree)[0]
    fields = {keys[0]: in_dictionaries(x) for keys, x in one_level if keys}
    if not one_level and (hasattr(tree, "_fields") or dataclasses.is_dataclass(tree)):
        return {}
    is_named = all(hasattr(key, "name") for key in fields)
    if fields and (is_named or not isinstance(tree, Mapping | list | tuple)):
        return {path_of((key,)): x for key, x in fields.items()}
    return jax.tree.map(
        lambda x: x if x is tree else in_dictionaries(x),
        tree,
        is_leaf=lambda x: x is not tree,
    )


def mutable(tree: Any) -> Any:
    """Makes dictionaries of Haiku's immutable mappings, which name no leaf.

    `jax.jit` refuses them beside `out_shardings`. A tree without them stays as it is.
    """
    is_flat = lambda x: isinstance(x, IMMUTABLE)  # noqa: E731
    if not any(map(is_flat, jax.tree.leaves(tree, is_leaf=is_flat))):
        return tree
    plain = lambda x: {k: mutable(y) for k, y in x.items()} if is_flat(x) else x  # noqa: E731
    return jax.tree.map(plain, tree, is_leaf=is_flat)


def in_double(array: Any) -> np.ndarray:
    """Converts to double precision, of complex numbers where they are."""
    return np.asarray(array, complex if np.iscomplexobj(array) else float)


def ordered(tree: Any, like: Any) -> Any:
    """Orders dictionaries, which JAX sorts, as they are in another tree."""
    children, treedef = jax.tree.flatten(like, lambda x: x is not like)
    if jax.tree_util.treedef_is_leaf(treedef):
        return tree
    # By its own structure: facts of a user's class need not be comparable.
    leaves, treedef = jax.tree.flatten(tree, lambda x: x is not tree)
    new = treedef.unflatten(map(ordered, leaves, children))
    for key in like if type(like) in (dict, defaultdict) else ():  # JAX sorts these.
        new[key] = new.pop(key)  # To the end.
    return new

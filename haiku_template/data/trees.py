"""Trees of arrays, such as batches, walked without JAX, which knows more kinds.

Why: docs/decisions/data.md#trees
A tree is a dictionary, list, tuple, named tuple or dataclass of trees, None, or a leaf.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Maps `function(path, leaf)` over the leaves; paths are as `inputs/tokens`."""

    def branch(name: Any, inner: Any) -> Any:
        return map_leaves(function, inner, f"{path}/{name}" if path else str(name))

    if tree is None:
        return None
    if dataclasses.is_dataclass(tree):  # chex's are mappings, too.
        names = [field.name for field in dataclasses.fields(tree)]
        branches = {name: branch(name, getattr(tree, name)) for name in names}
        return dataclasses.replace(tree, **branches)
    if isinstance(tree, Mapping):
        return {name: branch(name, inner) for name, inner in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(branch, tree._fields, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(branch(i, inner) for i, inner in enumerate(tree))
    return function(path, tree)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves of a tree by path, "" for one that is a leaf itself."""
    leaves: dict[str, Any] = {}
    map_leaves(leaves.__setitem__, tree)
    return leaves

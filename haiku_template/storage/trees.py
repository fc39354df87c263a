"""Orbax trees of others: parameters, perhaps with state, read a leaf at a time."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from haiku_template.errors import ConfigError
from haiku_template.storage.checkpoint import quiet

METADATA = "_METADATA"  # Of a tree, in its folder.
WHOLE = "default"  # Name of a tree that is saved alone.


class Leaf(NamedTuple):
    """A leaf on disk, its keys joined by `/`; `dtype` None for one of no array."""

    name: str
    folder: Path
    dtype: np.dtype | None
    shape: tuple[int, ...]
    read: Callable[..., Iterator[tuple[Any, np.ndarray]]]


def is_tree(source: Path) -> bool:
    """Tests for the folder of a tree, or of several that were saved together.

    Raises `ConfigError` for a folder of steps.
    """
    return bool(_items(source))


def _items(source: Path) -> dict[str, Path]:
    """Folders of trees by the first part of their names: none for a tree alone."""
    if (source / METADATA).is_file():
        return {"": source}
    found = {path.parent.name: path.parent for path in source.glob(f"*/{METADATA}")}
    steps = {path.parents[1] for path in source.glob(f"*/*/{METADATA}")}
    steps = {path for path in {*found.values(), *steps} if path.name.isdecimal()}
    if steps:
        named = ", ".join(sorted((path.name for path in steps), key=int))
        raise ConfigError(
            f"{source} holds Orbax trees of the steps {named}; give the folder of one "
            f"of them, such as {[*steps][0]}"
        )
    whole = found.get(WHOLE) or (len(found) == 1 and [*found.values()][0])
    return {"": whole} if whole else found


def leaves(source: Path) -> list[Leaf]:
    """Lists the leaves of a tree, or of several; raises `ConfigError` if damaged."""
    items = sorted(_items(source).items())
    return [leaf for name, folder in items for leaf in _leaves(name, folder)]


def _leaves(item: str, folder: Path) -> list[Leaf]:
    with _faults(folder), ocp.PyTreeCheckpointer() as checkpointer:
        held = checkpointer.metadata(folder.absolute()).item_metadata
        if held is None:
            raise ValueError("its leaves cannot be listed")
        found, structure = jax.tree_util.tree_flatten_with_path(held.tree)
    listed = []
    for i, (path, leaf) in enumerate(found):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else None
        read = functools.partial(_read, structure, i, folder)
        shape = tuple(getattr(leaf, "shape", None) or ())
        listed.append(Leaf(f"{item}/{name}".lstrip("/"), folder, dtype, shape, read))
    return listed


def _read(
    structure: Any, i: int, folder: Path, leaf: Any
) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads leaf `i` of a tree, in one piece."""
    number = structure.num_leaves
    wanted = structure.unflatten(
        [0 if j == i else ocp.PLACEHOLDER for j in range(number)]
    )
    how = structure.unflatten([ocp.RestoreArgs(restore_type=np.ndarray)] * number)
    arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=how)
    with _faults(folder), ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(folder.absolute(), args=arguments)
        values = np.asarray(jax.tree.leaves(tree)[i])
        if values.shape != leaf.shape:
            raise ValueError(f"{leaf.name} has shape {list(values.shape)}")
    yield (..., values) if leaf.shape else ((), values)


def _faults(folder: Path) -> Any:
    return quiet(f"the Orbax tree in {folder} is damaged", ConfigError)

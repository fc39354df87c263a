"""Orbax trees of others: parameters, perhaps with state, read a leaf at a time."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore  # Why: docs/decisions/finetuning.md#orbax-leaves

from haiku_template.bounded import exists, is_file, read_json
from haiku_template.errors import ConfigError
from haiku_template.storage.checkpoint import check_plain, quiet
from haiku_template.storage.workdir import check_path

MOST_METADATA = 2**28  # Bytes: some 300 for each leaf.
METADATA = "_METADATA"  # Of a tree, in its folder.
DATABASE = "manifest.ocdbt"  # Where leaves are no folders of their own.
PIECE = 2**22  # Bytes read at a time, unless a chunk has more.
PADDED = 2**20  # Numbers that a chunk may have beyond twice its array's.
WHOLE = "default"  # Name of a tree that is saved alone.


class Leaf(NamedTuple):
    """Leaf on disk, its keys joined by `/`; `dtype` is None if it is no array."""

    name: str
    file: Path  # The folder of its tree.
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
    if is_file(source / METADATA):
        return {"": source}
    folders = {path.parent.name: path.parent for path in source.glob(f"*/{METADATA}")}
    deeper = {path.parents[1] for path in source.glob(f"*/*/{METADATA}")}
    steps = {path for path in {*folders.values(), *deeper} if path.name.isdecimal()}
    if steps := steps or (not folders and deeper):  # Names may have a prefix.
        names = sorted((path.name for path in steps), key=lambda x: (len(x), x))
        numbers = ", ".join(names)
        raise ConfigError(
            f"{source} holds Orbax trees of the steps {numbers}; give the folder of "
            f"one of them, such as {[*steps][0]}"
        )
    single = folders.get(WHOLE) or (len(folders) == 1 and [*folders.values()][0])
    return {"": single} if single else folders


def leaves(source: Path) -> list[Leaf]:
    """Lists the leaves of a tree, or of several; raises `ConfigError` if damaged."""
    items = sorted(_items(source).items())
    return [leaf for name, folder in items for leaf in _leaves(name, folder)]


def _leaves(item: str, folder: Path) -> list[Leaf]:
    check_path(folder)
    with _faults(folder), ocp.PyTreeCheckpointer() as checkpointer:
        check_plain(folder)
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        if metadata is None:
            raise ValueError("its leaves cannot be listed")
        nodes = jax.tree_util.tree_leaves_with_path(metadata.tree)
        stored = read_json(folder / METADATA, most=MOST_METADATA)
    # Otherwise what is missing on disk would be zeros, as Orbax reads it.
    is_complete = bool(stored.get("store_array_data_equal_to_fill_value"))
    kind = {"driver": "zarr3" if metadata.use_zarr3 else "zarr"}
    kind["fill_missing_data_reads"] = not is_complete
    listed = []
    for path, leaf in nodes:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else None
        read = functools.partial(_read, kind, folder.absolute(), leaf.name)
        shape = tuple(getattr(leaf, "shape", None) or ())
        listed.append(Leaf(f"{item}/{name}".lstrip("/"), folder, dtype, shape, read))
    return listed


def _read(
    kind: dict[str, Any], folder: Path, name: str, leaf: Any
) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads a leaf a few megabytes at a time, or a chunk as it was written.

    Through Orbax, which opens the whole tree for it, a leaf of 400 takes 0.2 s.
    """
    if exists(folder / DATABASE):
        base = {"driver": "file", "path": f"{folder}/"}  # A URL would be decoded.
        store = {"driver": "ocdbt", "base": base, "path": name}
    else:
        store = {"driver": "file", "path": str(folder / name)}
    with _faults(leaf.file):
        array = tensorstore.open(kind | {"kvstore": store}, read=True).result()
        if array.shape != leaf.shape:
            raise ValueError(f"{leaf.name} has shape {list(array.shape)}")
        # TensorStore ends the process: docs/decisions/storage.md#orbax-trees
        numbers = math.prod(array.chunk_layout.write_chunk.shape or ())
        if numbers > 2 * math.prod(leaf.shape) + PADDED:
            raise ValueError(
                f"{leaf.name} of shape {list(leaf.shape)} has chunks of {numbers:,}"
            )
    total, *row_shape = leaf.shape or (1,)
    chunk = (array.chunk_layout.read_chunk.shape or (1,))[0]
    row = max(1, array.dtype.numpy_dtype.itemsize * math.prod(row_shape))
    rows = chunk * max(1, PIECE // (row * chunk))
    for first in range(0, total, rows):
        piece = slice(first, min(first + rows, total)) if leaf.shape else ()
        with _faults(leaf.file):
            values = array[piece].read().result()
        yield piece, values


def _faults(folder: Path) -> Any:
    return quiet(f"the Orbax tree in {folder} is damaged", ConfigError)

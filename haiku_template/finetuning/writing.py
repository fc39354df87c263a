"""A folder of tensors, written beside its place and then renamed.

It is there whole, or not at all; nothing is overwritten.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from haiku_template.finetuning.errors import PretrainedError, StorageError


class Shard(NamedTuple):
    """What one file is to hold.

    Attributes:
      metadata: words beside the tensors.
      tensors: what makes each tensor, by name; called when the file is written.
    """

    metadata: dict[str, str]
    tensors: dict[str, Callable[[], np.ndarray]]


def write_folder(
    folder: Path,
    shards: dict[str, Shard],
    others: dict[str, bytes],
    located: str,
    metadata: dict[str, Any],
) -> None:
    """Writes a folder, whole or not at all.

    Args:
      folder: must not exist.
      shards: the files of tensors, by name.
      others: the content of other files, by name.
      located: the name of the only file of tensors, or of their index.
      metadata: of the index.

    Raises:
      PretrainedError: `folder` exists.
      StorageError: it cannot be written; nothing of it is left.
    """
    with new_folder(folder) as partial:
        _fill(partial, shards, others, located, metadata)


def check_new(folder: Path) -> None:
    """Raises `PretrainedError` if `folder` exists."""
    if folder.exists():
        raise PretrainedError(
            f"{folder} exists, and nothing is overwritten; name one that does not"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, which gets the name `folder` if nothing goes wrong.

    Raises:
      PretrainedError: `folder` exists.
      StorageError: it cannot be written; nothing of it is left.
    """
    with new_file(folder) as partial:
        partial.mkdir()
        yield partial


@contextlib.contextmanager
def new_file(file: Path) -> Iterator[Path]:
    """Gives a path to write, which gets the name `file` if nothing goes wrong.

    Raises:
      PretrainedError: `file` exists.
      StorageError: it cannot be written; nothing of it is left.
    """
    check_new(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{file.name}.", dir=file.parent
        ) as temporary:
            partial = Path(temporary) / file.name
            yield partial
            partial.rename(file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


def save_tensors(
    file: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes a safetensors file that may be read by whom other new files may be."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata)
    file.chmod(mode)  # The library lets only the owner read.


def _fill(
    folder: Path,
    shards: dict[str, Shard],
    others: dict[str, bytes],
    located: str,
    metadata: dict[str, Any],
) -> None:
    for name, content in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    size = 0
    for name, shard in shards.items():
        tensors = {tensor: make() for tensor, make in shard.tensors.items()}
        save_tensors(folder / name, tensors, shard.metadata)
        size += sum(array.nbytes for array in tensors.values())
    if located in shards:
        return
    if metadata.get("total_size") != size:
        metadata = {"total_size": size}
    places = {
        tensor: name for name, shard in shards.items() for tensor in shard.tensors
    }
    index = {"metadata": metadata, "weight_map": places}
    (folder / located).write_bytes(to_json(index))


def to_json(content: dict[str, Any]) -> bytes:
    """As transformers writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

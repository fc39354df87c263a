"""Writing of files and folders for other software: all of each, or nothing."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from haiku_template import signals
from haiku_template.bounded import exists, is_link
from haiku_template.errors import ConfigError, StorageError


def check_new(folder: Path) -> None:
    """Raises `ConfigError` if `folder` exists."""
    try:
        is_taken = is_link(folder) or exists(folder)
    except OSError as error:  # A name that is too long, say.
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    if is_taken:
        raise ConfigError(
            f"{folder} exists, and nothing is overwritten; name one that does not"
        )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context of a folder to fill, renamed to `folder` if nothing goes wrong.

    Raises:
      ConfigError: `folder` exists.
      StorageError: it cannot be written; nothing of it is left.
    """
    with new_file(folder) as partial:
        partial.mkdir()
        yield partial


@contextlib.contextmanager
def new_file(file: Path) -> Iterator[Path]:
    """Context of a path to write, renamed to `file`; raises as `new_folder`."""
    check_new(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
            partial = Path(folder) / file.name
            with signals.called(lambda *_: shutil.rmtree(folder)):
                yield partial
                check_new(file)  # Another may have written it meanwhile.
                partial.rename(file)  # Why: docs/decisions/finetuning.md#folders
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


def save_tensors(
    file: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None
) -> None:
    """Writes a safetensors file with the usual permissions of a new file."""
    file.touch()
    mode = file.stat().st_mode
    # The library writes non-contiguous arrays in the wrong order.
    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    save_file(arrays, file, metadata or None)
    file.chmod(mode)  # The library lets only the owner read.


def to_json(content: dict[str, Any]) -> bytes:
    """Encodes JSON as transformers writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

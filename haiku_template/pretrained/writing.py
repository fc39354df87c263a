"""Writing of parameters: safetensors in Hugging Face's names, for other software."""

import contextlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, StorageError
from haiku_template.params import flatten
from haiku_template.pretrained.folder import CONFIG, read_config
from haiku_template.pretrained.rules import TRANSFORMS, Rule, find, tensor_name
from haiku_template.pretrained.tensors import (
    INDEX,
    SINGLE,
    Tensor,
    locate,
    pieces,
    read_headers,
    read_index,
    read_metadata,
)

logger = logging.getLogger(__name__)

FORMAT = {"format": "pt"}  # transformers asks for it.
# Files copied beside the tensors: tokenizers, and the pooling of sentences.
BESIDE = ("*.json", "*.txt", "*.model", "*/config.json")


def export_like(
    source: str | Path,
    folder: str | Path,
    params: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    config: dict[str, Any] | None = None,
) -> None:
    """Writes parameters as the files that they were read from, changed or not.

    Each tensor keeps its name, dtype and file; half precision is warned of. Tensors
    that the model does not use are copied, and so are config.json and the tokenizer.
    New parameters, such as a head's, follow in the last file. Memory holds one file at
    a time.

    Args:
      source: the Hugging Face folder that was read.
      folder: must not exist.
      params: the model's parameters, on the devices.
      rules: rename rules.
      config: changes to config.json, such as the names of the labels.

    Raises:
      ConfigError: `folder` exists, `source` cannot be read, no rule names one of the
        parameters, or the source's dtype cannot hold one.
      StorageError: the files cannot be written.
    """
    source, leaves = Path(source), flatten(params)
    located, headers = locate(source), read_headers(source)
    shards = {
        file.name: Shard(read_metadata(file), {})
        for file in dict.fromkeys(tensor.file for tensor in headers.values())
    }
    written, rounded = set(), Counter()
    for name, tensor in headers.items():
        rule, path = find(rules, name) or (None, None)
        written.add(path)
        if path in leaves and tensor.numpy_dtype.itemsize < leaves[path].dtype.itemsize:
            rounded[str(tensor.numpy_dtype)] += 1
        shards[tensor.file.name].tensors[name] = (
            _from_params(path, leaves[path], rule, tensor.numpy_dtype, devices)
            if path in leaves
            else _from_file(tensor)
        )
    new = {path: leaf for path, leaf in leaves.items() if path not in written}
    for dtype, number in rounded.items():
        logger.warning(
            "%d tensors are written as %s, as they are in %s: what was trained in "
            "float32 is rounded to it",
            number,
            dtype,
            source,
        )
    # New names have the prefix that may be missing, in brackets, if the others have.
    brackets = max(
        (True, False), key=lambda b: len(headers.keys() & _named(leaves, rules, b))
    )
    list(shards.values())[-1].tensors.update(
        _new_tensors(new, rules, devices, with_brackets=brackets)
    )
    index = read_index(located) if located.suffix == ".json" else {}
    others = {
        str(path.relative_to(source)): path.read_bytes()
        for pattern in BESIDE
        for path in source.glob(pattern)
        if path.is_file() and path.name != INDEX
    }
    if config is not None:
        others[CONFIG] = to_json(read_config(source) | config)
    write_folder(
        Path(folder), shards, others, located.name, index.get("metadata") or {}
    )


def export_new(
    folder: str | Path,
    params: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    config: dict[str, Any],
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes the parameters of a model made here, in Hugging Face's names.

    Args:
      folder: must not exist.
      params: the model's parameters, on the devices.
      rules: rename rules.
      config: the content of config.json, as from `to_config`.
      shard_bytes: the most that a file and host memory hold, unless one parameter has
        more.

    Raises:
      ConfigError: `folder` exists, or no rule names one of the parameters.
      StorageError: the files cannot be written.
    """
    leaves = flatten(params)
    tensors = _new_tensors(leaves, rules, devices)
    groups, room = [{}], shard_bytes
    for (name, make), leaf in zip(tensors.items(), leaves.values(), strict=True):
        if leaf.nbytes > room and groups[-1]:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = make
        room -= leaf.nbytes
    total = len(groups)
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    names, located = ([SINGLE], SINGLE) if total == 1 else (names, INDEX)
    shards = {
        name: Shard(FORMAT, group) for name, group in zip(names, groups, strict=True)
    }
    write_folder(Path(folder), shards, {CONFIG: to_json(config)}, located, {})


def _new_tensors(
    leaves: dict[str, Any],
    rules: Sequence[Rule],
    devices: DeviceManager,
    with_brackets: bool = True,
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that make the tensors of parameters, in the parameters' order."""
    named = {path: tensor_name(rules, path, with_brackets) for path in leaves}
    unnamed = [path for path, found in named.items() if found is None]
    if unnamed:
        raise ConfigError(
            f"the rename table names no tensor for {', '.join(unnamed)}; nothing was "
            "written"
        )
    return {
        name: _from_params(path, leaves[path], rule, leaves[path].dtype, devices)
        for path, (name, rule) in named.items()
    }


def _named(leaves: dict[str, Any], rules: Sequence[Rule], brackets: bool) -> set[str]:
    found = (tensor_name(rules, path, brackets) for path in leaves)
    return {name for name, _ in filter(None, found)}


def _from_params(
    path: str, leaf: Any, rule: Rule, dtype: Any, devices: DeviceManager
) -> Callable[[], np.ndarray]:
    view = TRANSFORMS[rule.transform]

    def make() -> np.ndarray:
        values = devices.fetch(leaf)
        with np.errstate(over="ignore"):
            # safetensors writes non-contiguous arrays in the wrong order.
            array = np.asarray(view(values), dtype, order="C")
        if dtype != leaf.dtype and np.isfinite(values).all() > np.isfinite(array).all():
            raise ConfigError(
                f"{path} has values up to {np.abs(values).max():.3g}, which {dtype}, "
                "its dtype in the folder that was read, cannot hold; nothing was "
                "written"
            )
        return array

    return make


def _from_file(tensor: Tensor) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        array = np.empty(tensor.shape, tensor.numpy_dtype)
        for rows, values in pieces(tensor):
            array[rows] = values
        return array

    return make


class Shard(NamedTuple):
    """Content of one file: its metadata, and functions that make its tensors."""

    metadata: dict[str, str]
    tensors: dict[str, Callable[[], np.ndarray]]


def write_folder(
    folder: Path,
    shards: dict[str, Shard],
    others: dict[str, bytes],
    located: str,
    metadata: dict[str, Any],
) -> None:
    """Writes a new folder, whole or not at all.

    Args:
      shards: the files of tensors, by name.
      others: the content of other files, by name.
      located: name of the only file of tensors, or of their index.
      metadata: of the index.

    Raises:
      ConfigError: `folder` exists.
      StorageError: it cannot be written; nothing of it is left.
    """
    with new_folder(folder) as partial:
        _fill(partial, shards, others, located, metadata)


def check_new(folder: Path) -> None:
    """Raises `ConfigError` if `folder` exists."""
    try:
        exists = folder.exists()
    except OSError as error:  # A name that is too long, say.
        raise StorageError(f"{folder} cannot be written: {error.strerror}") from error
    if exists:
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
    """Writes a safetensors file with the usual permissions of a new file."""
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
    """Encodes JSON as transformers writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

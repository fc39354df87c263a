"""Writing of parameters: safetensors in Hugging Face's names, for other software."""

import contextlib
import functools
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import haiku as hk
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from haiku_template import signals
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, StorageError
from haiku_template.params import flatten
from haiku_template.pretrained import tensors
from haiku_template.pretrained.folder import CONFIG
from haiku_template.pretrained.rules import TRANSFORMS, Rule, find, tensor_name

logger = logging.getLogger(__name__)

FORMAT = {"format": "pt"}  # transformers asks for it.
# Files copied beside the tensors: tokenizers, and the pooling of sentences.
BESIDE = ("*.json", "*.txt", "*.model", "*/config.json")
Makers = dict[str, Callable[[], np.ndarray]]  # Functions that make tensors, by name.


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
      config: changes to config.json, such as the names of the labels.

    Raises:
      ConfigError: `folder` exists, `source` cannot be read, no rule names one of the
        parameters, or the source's dtype cannot hold one.
      StorageError: the files cannot be written.
    """
    source, leaves = Path(source), flatten(params)
    located, headers = tensors.locate(source), tensors.read_headers(source)
    files = {tensor.file.name: tensor.file for tensor in headers.values()}
    shards: dict[str, Makers] = {name: {} for name in files}
    new, rounded = dict(leaves), Counter()
    for name, tensor in headers.items():
        rule, path = find(rules, name)
        make = functools.partial(whole, tensor)
        if path in leaves:
            leaf, dtype = leaves[path], tensor.numpy_dtype
            make = functools.partial(_tensor, path, leaf, rule, dtype, devices)
            rounded[str(dtype)] += dtype.itemsize < leaf.dtype.itemsize
            new.pop(path, None)
        shards[tensor.file.name][name] = make
    for dtype, number in (+rounded).items():
        logger.warning(
            "%d tensors are written as %s, as they are in %s: what was trained in "
            "float32 is rounded to it",
            *(number, dtype, source),
        )

    def common(brackets: bool) -> int:
        return sum(tensor_name(rules, path, brackets)[0] in headers for path in leaves)

    # New names have the prefix that may be missing, in brackets, if the others have.
    brackets = max((True, False), key=common)
    [*shards.values()][-1].update(_new_tensors(new, rules, devices, brackets))
    others = {
        str(path.relative_to(source)): path.read_bytes()
        for pattern in BESIDE
        for path in source.glob(pattern)
        if path.is_file() and path.name != tensors.INDEX
    }
    if config is not None:
        known = tensors.read_json(source / CONFIG, "model_type", str)
        others[CONFIG] = to_json(known | config)
    metadata = {name: tensors.read_metadata(file) for name, file in files.items()}
    if located.suffix == ".json":
        metadata[located.name] = tensors.read_index(located).get("metadata")
    write_folder(Path(folder), shards, others, located.name, metadata)


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
      config: the content of config.json, as from `to_config`.
      shard_bytes: the most that a file and host memory hold, unless one parameter has
        more.

    Raises:
      ConfigError: `folder` exists, or no rule names one of the parameters.
      StorageError: the files cannot be written.
    """
    leaves = flatten(params)
    groups, room = [{}], shard_bytes
    makers = _new_tensors(leaves, rules, devices)
    for (name, make), leaf in zip(makers.items(), leaves.values(), strict=True):
        if leaf.nbytes > room and groups[-1]:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = make
        room -= leaf.nbytes
    total, located = len(groups), tensors.INDEX
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if total == 1:
        names, located = [tensors.SINGLE], tensors.SINGLE
    shards, others = dict(zip(names, groups, strict=True)), {CONFIG: to_json(config)}
    write_folder(Path(folder), shards, others, located, dict.fromkeys(names, FORMAT))


def _new_tensors(
    leaves: dict[str, Any],
    rules: Sequence[Rule],
    devices: DeviceManager,
    with_brackets: bool = True,
) -> Makers:
    """Functions that make the tensors of parameters, in the parameters' order."""
    made, unnamed = {}, []
    for path, leaf in leaves.items():
        name, rule = tensor_name(rules, path, with_brackets)
        if name is None:
            unnamed.append(path)
        made[name] = functools.partial(_tensor, path, leaf, rule, leaf.dtype, devices)
    if unnamed:
        raise ConfigError(
            f"the rename table names no tensor for {', '.join(unnamed)}; nothing was "
            "written"
        )
    return made


def _tensor(
    path: str, leaf: Any, rule: Rule, dtype: np.dtype, devices: DeviceManager
) -> np.ndarray:
    values = devices.fetch(leaf)
    with np.errstate(over="ignore"):
        array = np.asarray(TRANSFORMS[rule.transform](values), dtype, order="C")
    if dtype != leaf.dtype and np.isfinite(values).all() > np.isfinite(array).all():
        raise ConfigError(
            f"{path} has values up to {np.abs(values).max():.3g}, which {dtype}, its "
            "dtype in the folder that was read, cannot hold; nothing was written"
        )
    return array


def whole(tensor: tensors.Tensor) -> np.ndarray:
    """Reads a tensor into memory."""
    array = np.empty(tensor.shape, tensor.numpy_dtype)
    for rows, values in tensors.pieces(tensor):
        array[rows] = values
    return array


def write_folder(
    folder: Path,
    shards: dict[str, Makers],
    others: dict[str, bytes],
    located: str,
    metadata: dict[str, dict[str, Any] | None],
) -> None:
    """Writes a new folder, whole or not at all; raises as `new_folder`.

    Args:
      shards: functions that make the tensors, by file and name.
      others: the content of other files, by name.
      located: name of the only file of tensors, or of their index.
      metadata: of the files of tensors and of the index, by name.
    """
    size, places = 0, {}
    with new_folder(folder) as partial:
        for name, content in others.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        for name, makers in shards.items():
            arrays = {tensor: make() for tensor, make in makers.items()}
            save_tensors(partial / name, arrays, metadata.get(name))
            size += sum(array.nbytes for array in arrays.values())
            places |= dict.fromkeys(arrays, name)
            arrays.clear()  # Memory holds one file at a time.
        if located not in shards:
            known = metadata.get(located) or {}
            if known.get("total_size") != size:
                known = {"total_size": size}
            index = {"metadata": known, "weight_map": places}
            (partial / located).write_bytes(to_json(index))


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
        with TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
            partial = Path(folder) / file.name
            with signals.called(lambda *_: shutil.rmtree(folder)):
                yield partial
                partial.rename(file)
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

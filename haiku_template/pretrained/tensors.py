"""Tensor files: safetensors, in one file or in Hugging Face's shards.

Headers are read first; values only when asked for, a few megabytes at a time.
"""

import contextlib
import functools
import math
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from haiku_template import bounded
from haiku_template.bounded import is_file
from haiku_template.errors import ConfigError, download

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# What published Haiku parameters may be pickles in, by suffix or first bytes.
PUBLISHED = (".npz", ".npy", ".joblib", ".pickle", ".pkl")
MAGIC = {b"PK\3\4": ".npz", b"\x93NUM": ".npy", b"\x80": ".pickle"}
MAGIC |= dict.fromkeys((b"\x78", b"\x1f\x8b", b"BZh", b"\xfd7zXZ"), ".joblib")
MOST_INDEX = 2**27  # Bytes of an index, of the largest models.
# Why: docs/decisions/finetuning.md#pieces
PIECE = 2**22  # Bytes read at a time, unless one row of a tensor has more.
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
DTYPES: dict[str, Any] = FLOATS | {"BOOL": np.bool_}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)}
DTYPES |= {f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)}


class Tensor(NamedTuple):
    """One tensor in its file; `dtype` as safetensors spells it: `F32`, `BF16`.

    `read` is as `pieces`, each format's own.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    read: Callable[["Tensor"], Iterator[tuple[Any, np.ndarray]]]

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype in NumPy; raises `ConfigError` if it has none."""
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"{self.name} in {self.file} is of dtype {self.dtype}, which cannot be "
                f"read; possible are {', '.join(DTYPES)}"
            )
        return np.dtype(DTYPES[self.dtype])

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


def locate(source: Path) -> Path:
    """Finds the safetensors file or the index of `source`: either, or their folder.

    Raises `ConfigError` if there is none, or only a pickle.
    """
    there = sorted(source.glob("*"))
    pickles = [path for path in (source, *there) if path.suffix in PICKLES]
    if is_file(source) and not pickles:
        _check_published(source)
        return source
    for name in (SINGLE, INDEX):
        if is_file(source / name):
            return source / name
    if pickles:
        raise ConfigError(
            f"{pickles[0]} is a pickle, which may run any code when it is read, and is "
            "refused; to convert it, in an environment with PyTorch and transformers: "
            f"AutoModel.from_pretrained({str(pickles[0].parent)!r})"
            f".save_pretrained('converted') writes converted/{SINGLE}"
        )
    names = ", ".join(path.name for path in there[:8])
    raise ConfigError(
        f"{source} is no safetensors file and no folder with {SINGLE} or {INDEX}; "
        + (f"it holds {names}" if names else f"nothing is there{download(source)}")
    )


def read_headers(source: Path) -> dict[str, Tensor]:
    """Lists the tensors of a model by name.

    Raises `ConfigError` if a file or shard is missing, truncated, damaged or hostile,
    or the shards do not hold what the index says.
    """
    located = locate(source)
    if located.suffix != ".json":
        return {tensor.name: tensor for tensor in _read_header(located)}
    places = read_index(located)["weight_map"]
    files = [located.parent / name for name in dict.fromkeys(places.values())]
    if missing := [file.name for file in files if not os.path.isfile(file)]:
        raise ConfigError(
            f"{located} names {len(files)} files, and of these {', '.join(missing)} "
            "cannot be found beside it"
        )
    tensors = [tensor for file in files for tensor in _read_header(file)]
    pairs = {(tensor.name, tensor.file.name) for tensor in tensors}
    if wrong := sorted({name for name, _ in pairs ^ set(places.items())}):
        raise ConfigError(
            f"{located} and its files disagree on the place of {', '.join(wrong)}"
        )
    return {tensor.name: tensor for tensor in tensors}


def read_index(index: Path) -> dict[str, Any]:
    """Reads an index: `weight_map` from tensors to files, and perhaps `metadata`.

    Raises `ConfigError` if it is damaged, or names a file outside of its folder.
    """
    content = read_json(index, "weight_map", dict)
    for name in content["weight_map"].values():
        if not name or Path(str(name)).name != name:
            raise ConfigError(
                f"{index} names {name!r}, which is no file of its own folder"
            )
    return content


def read_json(path: Path, key: str, kind: type) -> dict[str, Any]:
    """Reads a JSON object, or raises `ConfigError` unless its `key` is of a type."""
    try:
        content = bounded.read_json(path, most=MOST_INDEX)
        if not isinstance(content[key], kind):
            raise TypeError(f"{key} is no {kind.__name__}")
        return content
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; the folder of a Hugging Face model has one"
            + download(path.parent)
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged: it is no JSON object whose {key} is a {kind.__name__}"
        ) from error


def read_metadata(file: Path) -> dict[str, str]:
    """Reads the metadata of a safetensors file."""
    with safe_open(file, framework="numpy") as opened:
        return opened.metadata() or {}


def pieces(tensor: Tensor) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads a tensor a few rows at a time: an index into it, and the values there.

    Raises `ConfigError` if the file is shorter by now than its header says.
    """
    return tensor.read(tensor)


# Why: docs/decisions/finetuning.md#pieces
def _pieces(start: int, tensor: Tensor) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads a tensor whose first byte is `start` of its file, as `pieces`."""
    total, *row_shape = tensor.shape or (1,)
    row = math.prod(row_shape) * tensor.numpy_dtype.itemsize
    rows = max(1, PIECE // max(1, row))
    for first in range(0, total if row else 0, rows):
        last = min(first + rows, total)
        data = _bytes(tensor.file, start + first * row, (last - first) * row)
        values = np.frombuffer(data, tensor.numpy_dtype).reshape(-1, *row_shape)
        yield (slice(first, last), values) if tensor.shape else ((), values[0])


def _bytes(file: Path, start: int, size: int) -> bytes:
    data = b""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(start)
        data = opened.read(size)
    if len(data) < size:
        raise ConfigError(f"{file} was truncated while it was read")
    return data


def read_tensor(tensor: Tensor) -> np.ndarray:
    """Reads a tensor into memory; raises as `pieces`."""
    array = np.empty(tensor.shape, tensor.numpy_dtype)
    for rows, values in pieces(tensor):
        array[rows] = values
    return array


def _read_header(file: Path) -> list[Tensor]:
    try:
        with safe_open(file, framework="numpy"):
            pass  # It checks sizes and offsets: no gap, no overlap, nothing behind.
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = bounded.parse(opened.read(size), dict)
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is truncated, damaged, or no safetensors file: {error}"
        ) from error
    header.pop("__metadata__", None)
    read = lambda begin: functools.partial(_pieces, 8 + size + begin)  # noqa: E731
    return [
        Tensor(name, file, x["dtype"], tuple(x["shape"]), read(x["data_offsets"][0]))
        for name, x in header.items()
    ]


def _check_published(file: Path) -> None:
    """Refuses the formats of published Haiku parameters, with a way to convert them."""
    with file.open("rb") as opened:
        begin = opened.read(9)
    if file.suffix == ".safetensors" or begin[8:] == b"{":
        return  # Safetensors begin with eight bytes of a length, and JSON.
    by_content = (kind for magic, kind in MAGIC.items() if begin.startswith(magic))
    kind = next((k for k in (file.suffix, *by_content) if k in PUBLISHED), None)
    if kind is not None:
        raise ConfigError(
            f"{file} is a {kind} file, as Haiku parameters are published, and what may "
            "be a pickle is not read here: it can run any code. This reads it without "
            "running any, and writes what config.init_from takes:\n"
            f"    {convert_command(file)}"
        )


def convert_command(file: Path) -> str:
    """Words the command that makes safetensors of a pickle."""
    paths = map(str, (file, file.with_suffix(".safetensors")))
    source, target = map(shlex.quote, paths)
    return f"python -m haiku_template.convert --input={source} --output={target}"

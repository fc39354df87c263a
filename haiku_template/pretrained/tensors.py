"""Tensor files: safetensors, in one file or in Hugging Face's shards.

Headers are read first; values only when asked for, through mappings of a few megabytes
that are dropped again.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from haiku_template.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Code that reads published Haiku parameters, by a file's suffix or first bytes.
PUBLISHED = {
    ".npz": "dict(numpy.load({!r}))",
    ".npy": "numpy.load({!r}, allow_pickle=True).item()",
    ".joblib": "__import__('joblib').load({!r})",
    ".pickle": "__import__('pickle').load(open({!r}, 'rb'))",
}
MAGIC = {b"PK\3\4": ".npz", b"\x93NUM": ".npy", b"\x80": ".pickle"}
PIECE = 2**24  # Bytes mapped at a time, unless one row of a tensor has more.
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Tensor(NamedTuple):
    """One tensor in its file.

    Attributes:
      dtype: as safetensors spells it, such as `F32` or `BF16`.
      offset: bytes of the file before its first.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

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

    Raises:
      ConfigError: there is none, or only a pickle.
    """
    if source.suffix in PICKLES:
        raise _is_pickle(source)
    if source.is_file():
        _check_published(source)
        return source
    for name in (SINGLE, INDEX):
        if (source / name).is_file():
            return source / name
    there = sorted(path.name for path in source.glob("*"))
    for name in there:
        if Path(name).suffix in PICKLES:
            raise _is_pickle(source / name)
    found = f"it holds {', '.join(there[:8])}" if there else "nothing is there"
    raise ConfigError(
        f"{source} is no safetensors file and no folder with {SINGLE} or {INDEX}; "
        f"{found}"
    )


def read_headers(source: Path) -> dict[str, Tensor]:
    """Lists the tensors of a model by name, in the order of the files.

    Raises:
      ConfigError: a file or shard is missing, truncated, damaged or hostile, or the
        shards do not hold what the index says.
    """
    located = locate(source)
    if located.suffix != ".json":
        return {tensor.name: tensor for tensor in _read_header(located)}
    places = read_index(located)["weight_map"]
    files = [located.parent / name for name in dict.fromkeys(places.values())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"{located} names {len(files)} files, and of these {', '.join(missing)} "
            "cannot be found beside it"
        )
    tensors = [tensor for file in files for tensor in _read_header(file)]
    found = [(tensor.name, tensor.file.name) for tensor in tensors]
    wrong = sorted(name for name, _ in set(found) ^ set(places.items()))
    if wrong:
        raise ConfigError(
            f"{located} and its files disagree on the place of "
            f"{', '.join(dict.fromkeys(wrong))}"
        )
    return {tensor.name: tensor for tensor in tensors}


def read_index(index: Path) -> dict[str, Any]:
    """Reads an index: `weight_map` from tensors to files, and perhaps `metadata`.

    Raises:
      ConfigError: it is damaged, or names a file outside of its folder.
    """
    try:
        content = json.loads(index.read_text())
        names = {str(name) for name in content["weight_map"].values()}
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{index} is damaged: it is no JSON with a weight_map from tensors to files"
        ) from error
    for name in names:
        if not name or Path(name).name != name:
            raise ConfigError(
                f"{index} names {name!r}, which is no file of its own folder"
            )
    return content


def read_metadata(file: Path) -> dict[str, str]:
    """Reads the metadata of a safetensors file."""
    with safe_open(file, framework="numpy") as opened:
        return opened.metadata() or {}


def pieces(tensor: Tensor) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads a tensor a few rows at a time.

    Yields:
      (rows, values): an index into an array of the tensor's shape, and values mapped
      from the file, not to be kept beyond the next piece.

    Raises:
      ConfigError: the file is shorter by now than its header says.
    """
    dtype, shape = tensor.numpy_dtype, tensor.shape
    if not math.prod(shape):
        return
    row = math.prod(shape[1:]) * dtype.itemsize
    total, rows = (shape or (1,))[0], max(1, PIECE // row)
    with tensor.file.open("rb") as file:
        for first in range(0, total, rows):
            count = min(rows, total - first)
            try:
                mapped = np.memmap(
                    file, np.uint8, "r", tensor.offset + first * row, (count * row,)
                )
            except ValueError as error:
                raise ConfigError(
                    f"{tensor.file} was truncated while it was read"
                ) from error
            values = mapped.view(np.ndarray).view(dtype)
            if shape:
                yield slice(first, first + count), values.reshape(count, *shape[1:])
            else:
                yield ..., values.reshape(())


def _read_header(file: Path) -> list[Tensor]:
    try:
        # The library's checks: sizes, offsets, no gap, no overlap, nothing behind.
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise ConfigError(
            f"{file} is truncated, damaged, or no safetensors file: {error}"
        ) from error
    header.pop("__metadata__", None)
    return [
        Tensor(
            name,
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + size + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def _check_published(file: Path) -> None:
    """Refuses the formats of published Haiku parameters, with a way to convert them."""
    with file.open("rb") as opened:
        begin = opened.read(9)
    kind = {".pkl": ".pickle"}.get(file.suffix, file.suffix)
    if kind not in (*PUBLISHED, ".safetensors"):
        found = (kind for magic, kind in MAGIC.items() if begin.startswith(magic))
        kind = next(found, None)
    if kind is None or kind == ".safetensors" or begin[8:] == b"{":
        return  # Safetensors begin with eight bytes of a length, and JSON.
    names = "{f'{m}/{k}': x for m, p in params.items() for k, x in p.items()}"
    if kind == ".npz":
        names = "{k.replace('//', '/'): x for k, x in params.items()}"
    raise ConfigError(
        f"{file} is a {kind} file, as Haiku parameters are published, and what may be "
        "a pickle is not read here: it can run any code. If you trust it, these two "
        "lines of Python make safetensors of it:\n"
        "    import numpy, safetensors.numpy; params = "
        f"{PUBLISHED[kind].format(str(file))}\n"
        f"    safetensors.numpy.save_file({{k: numpy.array(x, order='C') for k, x in "
        f"{names}.items()}}, 'converted.safetensors')"
    )


def _is_pickle(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is a pickle, which may run any code when it is read, and is refused; "
        "to convert it, in an environment with PyTorch and transformers: AutoModel."
        f"from_pretrained({str(file.parent)!r}).save_pretrained('converted') writes "
        f"converted/{SINGLE}"
    )

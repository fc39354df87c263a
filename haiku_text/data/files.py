"""Token files: mapped into memory to be read; written whole, or not at all.

.safetensors, .npy, raw .bin, or folders of shards are read. Each format is a header and
then the tokens, so that opening a file reads the header alone.
"""

import json
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from haiku_template.bounded import exists, is_dir, parse
from haiku_template.data.files import npy_header, read_with
from haiku_template.errors import ConfigError
from haiku_text.data.stream import Shard, TokenStream

# As safetensors names them: U16 is <u2.
DTYPES = {f"{k}{8 * n}": f"<{k.lower()}{n}" for n in (1, 2, 4, 8) for k in "UI"}
HEADER_BYTES = 256  # Of what is written; last, when the number of tokens is known.
VALIDATION = re.compile(
    r"(?:^|[._-])(?:val|valid|validation|test|held_?out)(?:[._-]|$)"
)
Layout = tuple[np.dtype, int, int]  # Of tokens; bytes before the first; how many.


def open_tokens(
    path: Path, *, dtype: str = "uint16", tensor: str | None = None, random: bool
) -> TokenStream:
    """Maps a .safetensors, .npy or .bin file, or a folder of them in order of names.

    Args:
      dtype: of .bin files, which do not say it.
      tensor: its name in .safetensors files; None takes the only one that is a line of
        whole numbers.
      random: windows are read in no order: turns the kernel's read-ahead off.
    """
    layouts: dict[str, Callable[[Path], Layout]] = {
        ".safetensors": lambda file: _safetensors_layout(file, tensor),
        ".npy": _npy_layout,
        ".bin": lambda file: _raw_layout(file, dtype),
    }
    possible = ", ".join(layouts)

    def shard(file: Path) -> Shard:
        if file.suffix not in layouts:
            raise ConfigError(f"{file} is no token file; possible are {possible}")
        return _map(file, *layouts[file.suffix](file), random)

    files = [path]
    if is_dir(path):
        shown = (p for p in path.iterdir() if p.name[0] != ".")
        files = sorted(p for p in shown if p.suffix in layouts)
        if not files:
            raise ConfigError(f"{path} holds no {possible} file")
        held_out = [p.name for p in files if VALIDATION.search(p.stem)]
        if 0 < len(held_out) < len(files):
            raise ConfigError(
                f"{path} holds {held_out[0]} among files to train on; name the parts "
                "apart with --config.data.path and --config.data.validation_path"
            )
    return TokenStream([read_with(file, shard) for file in files])


def _map(file: Path, dtype: np.dtype, offset: int, size: int, random: bool) -> Shard:
    stop = offset + size * dtype.itemsize
    length = file.stat().st_size
    if stop > length:
        raise ValueError(f"its header promises {stop} bytes and it has {length}")
    if not size:
        raise ConfigError(f"{file} holds no tokens; one is the least")
    with file.open("rb") as f:
        mapping = mmap.mmap(f.fileno(), length, access=mmap.ACCESS_READ)
    if random:
        mapping.madvise(mmap.MADV_RANDOM)  # Why: docs/decisions/data.md#mapped-files
    # A plain array: slicing numpy.memmap itself is several times slower.
    tokens = np.frombuffer(mapping, dtype, size, offset)
    return Shard(tokens, str(file), mapping=mapping, offset=offset)


def _safetensors_layout(file: Path, tensor: str | None) -> Layout:
    with safe_open(file, framework="numpy"):
        pass  # It has checked all that a header can have wrong.
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = parse(f.read(size), dict)
    header.pop("__metadata__", None)
    names = [k for k, v in header.items() if (k == tensor if tensor else _is_line(v))]
    if len(names) != 1:
        tensors = ", ".join(f"{k} {v['dtype']}{v['shape']}" for k, v in header.items())
        problem = f"no tensor {tensor!r}" if tensor else "not one line of whole numbers"
        hint = "name the tokens with --config.data.tensor"
        raise ConfigError(f"{file} has {problem}, but {tensors or 'nothing'}; {hint}")
    entry = header[names[0]]
    if not _is_line(entry):
        raise ConfigError(
            f"the tensor {tensor!r} of {file} is {entry['dtype']}{entry['shape']}; "
            f"tokens have one dimension and a dtype of {', '.join(DTYPES)}"
        )
    begin = entry["data_offsets"][0]
    return np.dtype(DTYPES[entry["dtype"]]), 8 + size + begin, entry["shape"][0]


def _is_line(entry: dict[str, Any]) -> bool:
    return entry["dtype"] in DTYPES and len(entry["shape"]) == 1


def _npy_layout(file: Path) -> Layout:
    with file.open("rb") as f:
        shape, _, dtype = npy_header(f)
        offset = f.tell()
    if len(shape) != 1 or dtype.kind not in "iu":
        rule = "tokens are whole numbers in one dimension"
        raise ConfigError(f"{file} holds {dtype}{list(shape)}; {rule}")
    return dtype, offset, shape[0]


def _raw_layout(file: Path, dtype: str) -> Layout:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.kind not in "iu":
        rule = "is no type of token; a .bin file holds uint16 or uint32"
        raise ConfigError(f"dtype={dtype!r} {rule}")
    length = file.stat().st_size
    if length % kind.itemsize:
        raise ValueError(f"its {length} bytes are no whole number of {kind} tokens")
    return kind, 0, length // kind.itemsize


class TokenWriter:
    """Writer of a .safetensors file with one tensor `tokens`, uint16 or uint32.

    A context manager: the file appears, whole, with `publish`; else nothing stays.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.size = path, np.dtype(dtype), 0
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> "TokenWriter":
        self._file = self._partial.open("wb")
        self._file.write(bytes(HEADER_BYTES))
        return self

    def write(self, ids: list[int] | np.ndarray) -> None:
        """Appends tokens."""
        self._file.write(np.array(ids, self.dtype).tobytes())
        self.size += len(ids)

    def publish(self) -> None:
        """Completes the file and gives it its name."""
        self.complete()
        self._partial.rename(self.path)

    def complete(self) -> None:
        """Writes what is left to the disk: after it, `publish` needs no room."""
        width = self.dtype.itemsize
        entry = {"dtype": f"U{8 * width}", "shape": [self.size]}
        entry["data_offsets"] = [0, self.size * width]
        # The format allows spaces after the header.
        header = json.dumps({"tokens": entry}).encode().ljust(HEADER_BYTES - 8)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        self._partial.unlink(missing_ok=True)
        self._file.close()  # Last: it writes what is left, and a disk may be full.


def write_new(path: Path, contents: bytes) -> None:
    """Writes a tokenizer, whole or not at all; never over another one."""
    check_same(path, contents)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(contents)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def check_same(path: Path, contents: bytes) -> None:
    """Raises `ConfigError` when there is a tokenizer with other contents."""
    if exists(path) and path.read_bytes() != contents:
        hint = "write to a folder of its own, where it lies beside its tokens"
        raise ConfigError(f"{path} is another tokenizer; {hint}")

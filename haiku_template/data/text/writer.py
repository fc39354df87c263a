"""Writers of token files and tokenizers: whole under their names, or not at all."""

import json
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from haiku_template.errors import ConfigError

HEADER_BYTES = 256  # Written last, when the number of tokens is known.


class TokenWriter:
    """Writes a .safetensors file with one tensor `tokens`, as a context manager.

    The file appears under its name when `publish` is called, whole; without that
    nothing stays.

    Args:
      path: where it will be.
      dtype: uint16 or uint32.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.size = 0
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
        entry = {
            "dtype": {2: "U16", 4: "U32"}[self.dtype.itemsize],
            "shape": [self.size],
            "data_offsets": [0, self.size * self.dtype.itemsize],
        }
        # The format allows spaces after the header.
        header = json.dumps({"tokens": entry}).encode().ljust(HEADER_BYTES - 8)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._partial.rename(self.path)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._partial.unlink(missing_ok=True)
        self._file.close()  # Last: it writes what is left, and a disk may be full.


def write_new(path: Path, contents: bytes) -> None:
    """Writes a file that is not there yet, whole or not at all.

    A file with the same contents may be there.

    Raises:
      ConfigError: there is another.
    """
    check_same(path, contents)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(contents)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def check_same(path: Path, contents: bytes) -> None:
    """Raises `ConfigError` when there is a file with other contents."""
    if path.exists() and path.read_bytes() != contents:
        raise ConfigError(
            f"{path} is another tokenizer; write to a folder of its own, where the "
            "tokenizer lies beside its tokens"
        )

"""Files of pickles and arrays, by content: joblib's, NumPy's, compressed ones."""

import bz2
import gzip
import io
import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from haiku_template.conversion import pickles
from haiku_template.errors import ConfigError

PIECE = 2**20  # Bytes that are decompressed at a time.
# What a compressed file may become: weights shrink little, so more is an attack.
MOST_TIMES, ALWAYS = 100, 2**26
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
HEADER_DAMAGE = (ValueError, LookupError, TypeError, EOFError)
HEADER_DAMAGE += (SyntaxError, tokenize.TokenError)
ARCHIVE, ARRAY = b"PK\3\4", b"\x93NUMPY"


def load(path: Path, scratch: Path, is_inside: bool = False) -> Any:
    """Reads the tree in a file; what is compressed is decompressed into `scratch`.

    Inside of such a file, nothing is compressed again.

    Returns:
      Containers, numbers and text; each array is an `Array`.

    Raises:
      ConfigError: it is damaged or truncated, or holds what is refused.
    """
    with path.open("rb") as file:
        begin = file.read(len(ARRAY) + 8)
    if begin.startswith(ARRAY):
        return _load_array(path)
    if is_inside and begin.startswith((ARCHIVE, *COMPRESSED)):
        raise ConfigError("it is compressed twice, which is not read here")
    if begin.startswith(ARCHIVE):
        return _load_archive(path, scratch)
    for magic, open_ in COMPRESSED.items():
        if begin.startswith(magic):
            room = max(ALWAYS, MOST_TIMES * path.stat().st_size)
            inflated = scratch / f"{len([*scratch.iterdir()])}.inflated"
            try:
                with path.open("rb") as file, open_(file) as opened:
                    _copy(opened, inflated, room)
            except DAMAGE as error:
                raise _damaged(error) from error
            return load(inflated, scratch, is_inside=True)
    if not is_inside and begin[8:9] == b"{" and path.suffix == ".safetensors":
        raise ConfigError("it is safetensors, which config.init_from reads as it is")
    for magic, words in REFUSED.items():
        if begin.startswith(magic):
            raise ConfigError(f"it is {words}, which is not read here")
    return pickles.load(path)


def _load_archive(path: Path, scratch: Path) -> dict[str, Any]:
    room, tree = max(ALWAYS, MOST_TIMES * path.stat().st_size), {}
    try:
        with zipfile.ZipFile(path) as archive:
            for i, info in enumerate(archive.infolist()):
                member = scratch / f"{len(tree)}.{i}.npy"
                with archive.open(info) as opened:
                    room -= _copy(opened, member, room)
                name = info.filename.removesuffix(".npy")
                if name in tree:
                    raise ConfigError(f"it holds {name} twice")
                tree[name] = load(member, scratch, is_inside=True)
    except ConfigError:
        raise
    except (*DAMAGE, zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise _damaged(error) from error
    return tree


def _damaged(error: Exception) -> ConfigError:
    words = str(error) or f"it ends too early ({type(error).__name__})"
    return ConfigError(f"it is truncated or damaged: {words}")


def _load_array(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran, dtype = HEADERS[version](file)
        except HEADER_DAMAGE as error:
            words = str(error).partition("\n")[0]  # What follows tells to unpickle it.
            raise ConfigError(f"its header is damaged: {words}") from error
        first = file.tell()
    if dtype.hasobject:
        return pickles.load(path, first)
    if dtype.str[1:] == "V2":  # As NumPy writes bfloat16.
        dtype = np.dtype(pickles.ml_dtypes.bfloat16)
    array = pickles.Array(dtype, shape, fortran)
    size = path.stat().st_size - first
    if array.nbytes != size:
        raise ConfigError(
            f"it is truncated or damaged: {dtype}{list(shape)} has {array.nbytes:,} "
            f"bytes, and {size:,} are there"
        )
    array.data = pickles.Place(path, first, size)
    return array


def _copy(opened: BinaryIO, path: Path, room: int) -> int:
    """Writes at most `room` bytes of an opened file to `path`; returns their number."""
    size = 0
    with path.open("wb") as file:
        while piece := opened.read(PIECE):
            size += file.write(piece)
            if size > room:
                raise ConfigError(
                    f"it grows beyond {room:,} bytes, {MOST_TIMES} times its own size, "
                    "when it is decompressed"
                )
    return size


class _Zlib(io.RawIOBase):
    """A zlib stream, as joblib writes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._stream = file, zlib.decompressobj()

    def read(self, size: int = -1) -> bytes:
        """Reads up to `size` bytes."""
        while not self._stream.eof:
            packed = self._stream.unconsumed_tail or self._file.read(PIECE)
            if not packed:
                raise EOFError("the compressed stream has no end")
            if piece := self._stream.decompress(packed, size):
                return piece
        return b""


# How a compressed file begins, and what opens it.
COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x78": _Zlib,
    b"\x1f\x8b": gzip.open,
    b"BZ": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x5d\x00": lzma.open,
}
REFUSED = {
    b"\x04\x22\x4d\x18": "compressed with LZ4",
    b"ZF": "a file of joblib before 0.10",
}

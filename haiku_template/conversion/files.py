"""Files of pickles and arrays, by content: joblib's, NumPy's, compressed ones."""

import bz2
import contextlib
import functools
import gzip
import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
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
DAMAGE += (zipfile.BadZipFile, ValueError, RuntimeError)
HEADER_DAMAGE = (ValueError, LookupError, TypeError, EOFError)
HEADER_DAMAGE += (SyntaxError, tokenize.TokenError)
ARCHIVE, ARRAY = b"PK\3\4", b"\x93NUMPY"
Limit = Callable[[int], None]
REFUSED = {
    b"\x04\x22\x4d\x18": "compressed with LZ4",
    b"ZF": "a file of joblib before 0.10",
}


def load(
    path: Path, scratch: Path, limit: Limit = lambda _: None, is_inside: bool = False
) -> Any:
    """Reads the tree in a file; what is compressed is decompressed into `scratch`.

    Inside of such a file, nothing is compressed again. `limit` is told of the bytes so
    far, with each piece that is decompressed.

    Returns:
      Containers, numbers and text; each array is an `Array`.

    Raises `ConfigError` if it is damaged or truncated, or holds what is refused.
    """
    with path.open("rb") as file:
        begin = file.read(len(ARRAY) + 8)
    if begin.startswith(ARRAY):
        return _load_array(path)
    if is_inside and begin.startswith((ARCHIVE, *COMPRESSED)):
        raise ConfigError("it is compressed twice, which is not read here")
    room = max(ALWAYS, MOST_TIMES * path.stat().st_size)
    try:
        if begin.startswith(ARCHIVE):
            return _load_archive(path, scratch, limit, room)
        for magic, pieces in COMPRESSED.items():
            if begin.startswith(magic):
                with path.open("rb") as file:
                    _copy(pieces(file), scratch / "inflated", room, limit)
                return load(scratch / "inflated", scratch, is_inside=True)
    except ConfigError:
        raise
    except DAMAGE as error:
        reason = str(error) or f"it ends too early ({type(error).__name__})"
        raise ConfigError(f"it is truncated or damaged: {reason}") from error
    if not is_inside and begin[8:9] == b"{" and path.suffix == ".safetensors":
        raise ConfigError("it is safetensors, which config.init_from reads as it is")
    for magic, kind in REFUSED.items():
        if begin.startswith(magic):
            raise ConfigError(f"it is {kind}, which is not read here")
    return pickles.load(path)


def _load_archive(path: Path, scratch: Path, limit: Limit, room: int) -> dict[str, Any]:
    size, by_name = 0, {}
    with zipfile.ZipFile(path) as archive:
        for i, info in enumerate(archive.infolist()):
            with archive.open(info) as file:
                target = scratch / f"{i}.npy"
                size = _copy(_pieces(file), target, room, limit, size)
            name = info.filename.removesuffix(".npy")
            if name in by_name:
                raise ConfigError(f"it holds {name} twice")
            by_name[name] = scratch / f"{i}.npy"
    return {name: load(x, scratch, is_inside=True) for name, x in by_name.items()}


def _load_array(path: Path) -> Any:
    with path.open("rb") as file:
        try:
            shape, is_fortran, dtype = HEADERS[np.lib.format.read_magic(file)](file)
        except HEADER_DAMAGE as error:
            reason = str(error).partition("\n")[0]  # What follows tells to unpickle it.
            raise ConfigError(f"its header is damaged: {reason}") from error
        begin = file.tell()
    if dtype.hasobject:
        return pickles.load(path, begin)
    if dtype.str[1:] == "V2":  # As NumPy writes bfloat16.
        dtype = np.dtype(ml_dtypes.bfloat16)
    data = pickles.MappedFile(path, begin).remainder()
    array = pickles.Array()
    array.values = pickles.make_array(shape, dtype, is_fortran, data)
    return array


def _copy(
    pieces: Iterable[bytes], path: Path, room: int, limit: Limit, size: int = 0
) -> int:
    """Writes at most `room` bytes, less `size`, to `path`; returns those of both."""
    with path.open("wb") as file:
        for piece in pieces:
            limit(size := size + file.write(piece))
            if size > room:
                raise ConfigError(
                    f"it grows beyond {room:,} bytes, {MOST_TIMES} times its own size, "
                    "when it is decompressed"
                )
    return size


def _pieces(file: Any, opener: Callable[..., Any] = contextlib.nullcontext) -> Any:
    with opener(file) as opened:
        while piece := opened.read(PIECE):
            yield piece


def _zlib_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Decompresses a zlib stream, as joblib writes them."""
    stream = zlib.decompressobj()
    while not stream.eof:
        if not (packed := stream.unconsumed_tail or file.read(PIECE)):
            raise EOFError("the compressed stream has no end")
        yield stream.decompress(packed, PIECE)


# How a compressed file begins, and what decompresses it.
COMPRESSED: dict[bytes, Callable[[BinaryIO], Iterator[bytes]]] = {
    b"\x78": _zlib_pieces,
    b"\x1f\x8b": functools.partial(_pieces, opener=gzip.open),
    b"BZ": functools.partial(_pieces, opener=bz2.open),
    b"\xfd7zXZ": functools.partial(_pieces, opener=lzma.open),
    b"\x5d\x00": functools.partial(_pieces, opener=lzma.open),
}

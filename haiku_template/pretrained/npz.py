"""NumPy archives: `.npz` of arrays with flat names, read without unpickling any."""

import functools
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.bounded import is_file
from haiku_template.data.files import npy_header
from haiku_template.errors import ConfigError
from haiku_template.pretrained import tensors
from haiku_template.pretrained.tensors import Tensor

NAMES = {np.dtype(dtype): name for name, dtype in tensors.DTYPES.items()}
DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, LookupError)
# Errors of archives with a password, of odd ones, and of headers that are no Python.
DAMAGE += (TypeError, RuntimeError, SyntaxError, tokenize.TokenError)


def is_archive(source: Path) -> bool:
    """Tests for a zip file that is not one of PyTorch's."""
    if not is_file(source) or source.suffix in tensors.PICKLES:
        return False
    with source.open("rb") as file:
        return file.read(4) == b"PK\3\4"


def read_headers(source: Path) -> list[Tensor]:
    """Lists the arrays of an archive; those of objects have the dtype `object`.

    Raises `ConfigError` if it is truncated or damaged.
    """
    listed, name = [], "its end"
    try:
        # Open as long as the tensors are there: reading its directory takes long.
        archive = zipfile.ZipFile(source)
        for info in archive.infolist():
            name = info.filename
            listed.append(_header(archive, info, source))
    except DAMAGE as error:
        raise ConfigError(
            f"{source} is truncated, damaged, or no archive of NumPy's, at {name}: "
            + str(error).partition("\n")[0]  # What follows tells to unpickle it.
        ) from error
    return listed


def dtype_name(dtype: np.dtype | None) -> str:
    """Names a dtype as safetensors do, or as NumPy if they have none."""
    if dtype is None:
        return "text"
    return NAMES.get(dtype.newbyteorder("="), str(dtype))


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, source: Path) -> Tensor:
    with archive.open(info) as file:
        shape, fortran, dtype = _layout(file)
        size, first = math.prod(shape) * dtype.itemsize, file.tell()
    if not dtype.hasobject and first + size != info.file_size:
        raise ValueError(
            f"{info.filename} claims {dtype}{list(shape)}, of {size:,} bytes, and has "
            f"{info.file_size - first:,}"
        )
    name = info.filename.removesuffix(".npy")
    read = functools.partial(_pieces, archive, info)
    return Tensor(name, source, dtype_name(dtype), tuple(shape), read)


def _layout(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    shape, fortran, dtype = npy_header(file)
    # NumPy writes bfloat16 as two bytes without a meaning.
    return shape, fortran, np.dtype(tensors.FLOATS["BF16"]) if dtype == "V2" else dtype


def _pieces(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, tensor: Tensor
) -> Iterator[tuple[Any, np.ndarray]]:
    """Reads an array as `tensors.pieces` does; the archive's checksum holds."""
    try:
        with archive.open(info) as file:
            shape, fortran, dtype = _layout(file)
            total, *row_shape = (shape[::-1] if fortran else shape) or (1,)
            row = math.prod(row_shape) * dtype.itemsize
            rows = max(1, tensors.PIECE // max(1, row))
            for first in range(0, total if row else 0, rows):
                index = slice(first, min(first + rows, total))
                data = file.read((index.stop - first) * row)
                values = np.frombuffer(data, dtype).reshape(-1, *row_shape)
                if not shape:
                    yield (), values[0]
                else:
                    yield ((..., index), values.T) if fortran else (index, values)
            file.read(1)  # At the end of the member its checksum is compared.
    except DAMAGE as error:
        raise ConfigError(
            f"{tensor.file}: {tensor.name} is damaged: {error}"
        ) from error

"""A safetensors file, written from arrays that lie in other files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.conversion.pickles import Array, Place
from haiku_template.errors import ConfigError

PIECE = 2**22  # Bytes that are copied at a time.
DTYPES = {"bool": "BOOL", "bfloat16": "BF16"}
DTYPES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
DTYPES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
DTYPES |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}


def write(target: Path, arrays: dict[str, Array], most: int) -> int:
    """Writes arrays in C order and this machine's byte order; returns their bytes.

    Raises:
      ConfigError: an array is of no dtype of safetensors, or all have more bytes than
        `most`, as when a file names one array many times.
    """
    # The largest items first, so that every array is aligned.
    arrays = dict(sorted(arrays.items(), key=lambda x: (-x[1].dtype.itemsize, x[0])))
    header: dict[str, Any] = {}
    size = 0
    for name, array in arrays.items():
        kind = DTYPES.get(array.dtype.name)
        if kind is None:
            raise ConfigError(
                f"{name} is of dtype {array.dtype.name}; possible are "
                f"{', '.join(DTYPES)}"
            )
        places = [size, size + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": places}
        size = places[1]
    if size > most:
        raise ConfigError(f"it names the same arrays again, to {size:,} bytes in all")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            for piece in _pieces(array):
                file.write(piece)
    return size


def _pieces(array: Array) -> Iterator[bytes]:
    """Reads an array's bytes in C order, a few megabytes at a time."""
    data = array.data
    if isinstance(data, Place) and data.size:
        data = np.memmap(data.file, np.uint8, "r", data.first, (data.size,))
    values = np.frombuffer(data if array.nbytes else b"", array.dtype)
    if array.axes:
        stored = [array.shape[i] for i in np.argsort(array.axes)]
        values = values.reshape(stored).transpose(array.axes)
    values = values.reshape(array.shape, order="F" if array.fortran else "C")
    native = array.dtype.newbyteorder("=")
    flags, size = ["external_loop", "buffered", "zerosize_ok"], PIECE // native.itemsize
    kind = {"op_dtypes": [native], "casting": "equiv", "buffersize": size}
    for piece in np.nditer(values, flags, order="C", **kind):
        yield piece.tobytes()

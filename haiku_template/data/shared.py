"""Values in memory that a run shares with its worker processes.

A value is a pickle whose arrays lie beside it, aligned as JAX's CPU devices take them
over: [sizes of the sections][the pickle][array]..., each at a multiple of 64 bytes. So
an array is written once and not copied again.
Why: docs/decisions/data.md#shared-memory
"""

import mmap
import os
import pickle
import tempfile
from typing import Any, BinaryIO

import numpy as np

from haiku_template.errors import DataError

ALIGNMENT = 64  # Bytes.


def write(value: Any) -> tuple[BinaryIO, int]:
    """Writes a value to memory without a name; returns its file, and its sections.

    Raises `DataError` where there is not enough memory, and as `pickle.dumps`.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    sections = [memoryview(stream), *(buffer.raw() for buffer in buffers)]
    sizes = np.array([section.nbytes for section in sections], np.int64)
    try:
        file = _memory()
        for section in (sizes.data, *sections):
            file.write(section)
            file.write(bytes(-section.nbytes % ALIGNMENT))
        file.flush()
    except OSError as error:
        raise DataError(
            f"a batch of {sizes.sum():,} bytes does not fit in the memory that a data "
            f"worker shares with the run: {error.strerror}; use fewer data.workers, or "
            "a smaller config.batch_size"
        ) from error
    return file, len(sections)


def read(file: int, count: int) -> Any:
    """Reads the value of a file of `count` sections, and closes the file.

    Its arrays are views, and the memory is freed with the last of them.
    """
    with open(file, "rb") as opened:
        # Whoever changes an array changes a copy.
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    memory, sections = memoryview(memory), []
    start = _aligned(8 * count)
    for size in memory[: 8 * count].cast("q"):
        sections.append(memory[start : start + size])
        start = _aligned(start + size)
    return pickle.loads(sections[0], buffers=sections[1:])


def pickled(value: Any) -> bytes:
    """Pickles a value whole; raises as `pickle.dumps`."""
    return pickle.dumps(value)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _memory() -> BinaryIO:
    """File that is in no folder: it ends with the last process that has it open."""
    if hasattr(os, "memfd_create"):  # Not of the size of /dev/shm.
        return open(os.memfd_create("batch"), "w+b")
    return tempfile.TemporaryFile()

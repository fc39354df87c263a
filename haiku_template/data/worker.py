"""Process that makes batches for a run, and imports no JAX, unless its data does.

    python -m haiku_template.data.worker SOCKET SETUP SECTIONS

SOCKET and SETUP are numbers of open files. SETUP, `shared` memory of so many sections,
says what to make the data of. The run sends lines of JSON, [name of a set, index] for
each batch, and gets a `HEADER` in their order, each with a file of shared memory.
The first answer is not asked for: the digests of a batch that SETUP names.
"""

import contextlib
import hashlib
import os
import queue
import socket
import struct
import sys
import threading
from multiprocessing.pool import ExceptionWithTraceback
from typing import Any, BinaryIO

import numpy as np
from absl import flags

from haiku_template import bounded
from haiku_template.data import shared
from haiku_template.data.dataset import Batch, Data
from haiku_template.data.trees import leaves_by_path

HEADER = struct.Struct("=?q")  # True for an error; the number of sections.
TRAIN, EVALUATION = "training", "evaluation"


def sets_of(data: Data) -> dict[str, Any]:
    """Training set, and evaluation sets if there are any, by name."""
    sets = {TRAIN: data.train}
    if data.evaluation is not None:
        sets[EVALUATION] = data.evaluation
    return sets | {f"{EVALUATION}/{k}": x for k, x in data.evaluations.items()}


def digests(batch: Batch) -> dict[str, str]:
    """Digest of each array of a batch by path, of type, shape and bits."""
    by_path = {}
    for path, leaf in leaves_by_path(batch).items():
        array = np.ascontiguousarray(leaf)
        # The bits of objects are where they lie in memory.
        contents = b"" if array.dtype.hasobject else array.tobytes()
        kind = f"{array.dtype}{np.shape(leaf)} "
        by_path[path] = kind + hashlib.sha256(contents).hexdigest()
    return by_path


def main() -> None:
    """Makes batches until the run has ended, or closes the socket."""
    number, *setup = map(int, sys.argv[1:])
    flags.FLAGS.mark_as_parsed()  # The code of data may ask for its own.
    run = socket.socket(fileno=number)
    keys: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(run, keys), daemon=True).start()
    sets: dict[str, Any] = {}

    def first() -> dict[str, str]:
        given, function, args, kwargs, name, index = shared.read(*setup)
        for flag in given.keys() & {*flags.FLAGS}:  # Of the module of `function`.
            flags.FLAGS[flag].value = given[flag]
        sets.update(sets_of(function(*args, **kwargs)))
        return digests(sets[name].batch(index))

    if not _answer(run, first):
        return
    while True:
        name, index = keys.get()
        _answer(run, lambda: sets[name].batch(index))  # noqa: B023


def _receive(run: socket.socket, keys: queue.SimpleQueue) -> None:
    """Passes requests on; their end is that of this process, whatever it is at."""
    with contextlib.suppress(OSError):
        for line in run.makefile("rb"):
            keys.put(bounded.parse(line, list))
    os._exit(0)


def _answer(run: socket.socket, make: Any) -> bool:
    """Sends what `make` returns or raises; True if it returned."""
    error = None
    try:
        file, count = shared.write(make())
    except BaseException as raised:
        error = raised
        file, count = _write_error(raised)
    with file:
        socket.send_fds(run, [HEADER.pack(error is not None, count)], [file.fileno()])
    return error is None


def _write_error(error: BaseException) -> tuple[BinaryIO, int]:
    """Writes an error, with its traceback as its cause."""
    try:
        answer = shared.write(ExceptionWithTraceback(error, error.__traceback__))
        shared.read(os.dup(answer[0].fileno()), answer[1])  # Not all can be read again.
        return answer
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        return shared.write(ExceptionWithTraceback(plain, error.__traceback__))


if __name__ == "__main__":
    main()

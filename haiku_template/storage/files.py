"""Dispensable files: no error in writing them ends or blocks the run."""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from haiku_template import bounded

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def dispensable(target: str | Path) -> Iterator[None]:
    """Turns any error inside into a warning that names `target`."""
    try:
        yield
    except Exception as error:
        logger.warning("%s is not written, and the run continues: %s", target, error)


def appended(path: Path) -> BinaryIO:
    """Opens a file of the run to append to; raises `OSError` for a link or a device."""
    # Why: docs/decisions/storage.md#links
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return bounded.opened(path, "ab", flags)


def append_whole(path: Path, data: bytes) -> None:
    """Appends all of `data`, or raises `OSError` and leaves the file as it was."""
    with appended(path).detach() as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


class Note:  # Why: docs/decisions/storage.md#notes
    """A file to append to, text or bytes: only its first error is a warning.

    Data that could not be written waits in the file's buffer while there is room, so
    that a full disk loses no line in part. `mode` is `a` for text, `ab` for bytes.
    """

    def __init__(self, path: Path, mode: str = "a") -> None:
        self._path, self._file, self._warned = path, None, False
        with self._errors():
            path.parent.mkdir(exist_ok=True)
            file = appended(path)
            self._file = file if "b" in mode else io.TextIOWrapper(file, "utf-8")

    def write(self, data: Any) -> None:
        """Appends `data`."""
        with self._errors():
            if self._file is not None:
                self._file.write(data)
                self._file.flush()

    def flush(self) -> None:
        """Does nothing: `write` has."""

    def close(self) -> None:
        """Closes the file."""
        with self._errors():
            if self._file is not None:
                self._file.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                with dispensable(self._path):
                    raise error

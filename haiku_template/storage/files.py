"""Dispensable files: no error in writing them ends or blocks the run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def dispensable(what: str | Path) -> Iterator[None]:
    """Turns any error inside into a warning that names `what`."""
    try:
        yield
    except Exception as error:
        logger.warning("%s is not written, and the run continues: %s", what, error)


class Note:
    """A file to append to, text or bytes: only its first error is a warning.

    Data that could not be written waits in the file's buffer while there is room, so
    that a full disk loses no line in part. `mode` is `a` for text, `ab` for bytes.
    """

    def __init__(self, path: Path, mode: str = "a") -> None:
        self._path, self._file, self._warned = path, None, False
        with self._errors():
            path.parent.mkdir(exist_ok=True)
            self._file = path.open(mode, encoding=None if "b" in mode else "utf-8")

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

"""Saves that fail: a sentence for each, and an error once too many failed in a row."""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from haiku_template.errors import StorageError

logger = logging.getLogger(__name__)


class FailedSaves:
    """Count of the saves that failed in a row, of which the last of `most` is fatal."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self.error: StorageError | None = None  # Of the last save, once it is known.

    def note(self, error: StorageError) -> None:
        """Warns of a save that failed; raises `StorageError` for one too many."""
        self.count += 1
        self.error = error
        if self.count < self.most:
            return logger.warning(
                f"{error}; the run continues, and the next save tries again "
                f"({self.count} of {self.most} failures in a row that end it)"
            )
        self.error = None
        if self.most > 1:
            error = StorageError(f"{error}; {self.count} saves in a row failed")
        raise error

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context of a save, whose failure it notes."""
        try:
            yield
        except StorageError as error:
            self.note(error)


@contextlib.contextmanager
def faults(
    sentence: str, undo: Callable[[StorageError], object] = lambda fault: None
) -> Iterator[None]:
    """Turns errors of the file system and of Orbax into a `StorageError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        is_sentence = isinstance(error, StorageError)
        fault = error if is_sentence else StorageError(f"{sentence}: {cause(error)}")
        undo(fault)
        raise fault from error.__cause__ if is_sentence else error


def cause(error: BaseException) -> str:
    """Tells what the system says in an error of TensorStore, or its first line."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return f"[Errno {code[1]}] {os.strerror(int(code[1]))}"
    return str(error).split("\n")[0].split(" [tensorstore_spec")[0][:300]


def root_cause(error: BaseException) -> str:
    """Tells the same of the first error of a chain: Orbax's own names no leaf."""
    while error.__cause__:
        error = error.__cause__
    return cause(error)


@contextlib.contextmanager
def muted() -> Iterator[list[Exception]]:
    """Context in which Orbax and its threads print nothing of what fails.

    Some do later: if there is an error in the list, the hook stays.
    """
    # Why: docs/decisions/storage.md#failed-saves
    absl, hook = logging.getLogger("absl"), sys.unraisablehook
    is_foreign = functools.partial(_is_foreign)  # Of this context alone.
    absl.addFilter(is_foreign)
    # Why: docs/decisions/patches.md#abandoned-reads
    sys.unraisablehook = filtered = functools.partial(report_unabandoned, hook)
    errors: list[Exception] = []
    try:
        yield errors
    finally:
        absl.removeFilter(is_foreign)
        if sys.unraisablehook is filtered and not errors:  # Nothing was damaged.
            sys.unraisablehook = hook


def _is_foreign(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def report_unabandoned(report: Callable[[Any], object], unraisable: Any) -> None:
    """Reports an exception, but not of reads and writes that Orbax abandoned."""
    code = getattr(unraisable.object, "cr_code", None)  # Of a coroutine.
    if code is None and unraisable.exc_traceback:  # Python 3.14 names no object.
        code = unraisable.exc_traceback.tb_frame.f_code
    is_orbax = code is not None and "orbax" in Path(code.co_filename).parts
    if not (is_orbax or "Event loop is closed" in str(unraisable.exc_value)):
        report(unraisable)

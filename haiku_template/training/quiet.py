"""Keeps Orbax from telling at length what becomes one sentence."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Holds back what Orbax logs about a checkpoint that it cannot read."""
    orbax = logging.getLogger("absl")
    level = orbax.level
    orbax.setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_not_of_abandoned_reads)
    _ignore_closed_loops()
    try:
        yield
    finally:
        orbax.setLevel(level)


def _not_of_abandoned_reads(record: logging.LogRecord) -> bool:
    """Leaves out the tracebacks of reads that Orbax gave up, which come at any time."""
    return "never retrieved" not in record.getMessage()


@functools.cache
def _ignore_closed_loops() -> None:
    """Keeps those reads from reporting that their event loop is gone."""
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            report(unraisable)

    sys.unraisablehook = hook

"""Mends of faults that were found, and what each was before: data for `__main__`."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Mend(NamedTuple):
    """One place that mends a fault, and the test that holds it.

    `fault` says what was wrong, in a few words. In `file`, `code` occurs once; with
    `without` in its place the fault is back, and `test`, a node id, fails.
    """

    fault: str
    file: str
    code: str
    without: str
    test: str


def mends() -> list[Mend]:
    """Reads the mends of all tables beside this file."""
    tables = sorted(Path(__file__).parent.glob("*.toml"))
    return [
        Mend(**entry)
        for table in tables
        for entry in tomllib.loads(table.read_text())["mend"]
    ]

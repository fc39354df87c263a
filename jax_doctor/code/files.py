"""Files of a folder, Python and notebooks, parsed and never imported."""

import ast
import bisect
import json
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_doctor.code.names import Removed
from jax_doctor.code.scan import removed_names

# Where code of others lies, or none; a folder that is asked for is read all the same.
SKIPPED = {".git", ".hg", ".tox", ".nox", ".venv", "site-packages", "node_modules"}
SKIPPED |= {"__pycache__", ".ipynb_checkpoints"}
MOST_BYTES = 2**25
MENTION = re.compile(rb"jax|haiku|optax")
# Of notebooks: lines that are no Python, and the first line of cells that are not.
MAGIC = re.compile(
    r"(?m)^([ \t]*)(?:(?:%[%\w]|[!?]|[\w, ]+=\s*[%!])(?:.*\\\n)*.*|[\w.]+\?+[ \t]*)$"
)
FOREIGN = re.compile(r"(?:\s*#.*\n)*\s*%%(?!time|capture|prun)")
Rows = list[dict[str, Any]]


class Unread(Exception):
    """A file, or a cell of one, that is not read: the reason, and the line or 0."""


def report(top: Path) -> dict[str, Any]:
    """Report of the removed names in a folder or a file, for JSON. Time in seconds."""
    start, names, unread, files = time.monotonic(), [], [], set()
    for path in _files(top, unread):
        try:
            info = path.stat()
            if (info.st_dev, info.st_ino) in files:
                continue
            files.add((info.st_dev, info.st_ino))
            source = _source(path, info)
            if MENTION.search(source):
                names += _names(path, source, unread)
        except (OSError, Unread) as error:
            why = error.strerror if isinstance(error, OSError) else error.args[0]
            unread.append({"file": str(path), "cell": 0, "line": 0, "why": why})
    return {
        "asked": f"--code={top}",
        "works": not names,
        "files": len(files),
        "names": names,
        "not_read": unread,
        "seconds": round(time.monotonic() - start, 3),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """Formats the report, one line for each place."""
    text = []
    for row in report["names"]:
        name = Removed(row["name"], row["removed_in"], row["instead"])
        text.append(f"{_place(row)}: {name}")
    text += [f"{_place(row)}: not read: {row['why']}" for row in report["not_read"]]
    uses, files = report["names"], len({row["file"] for row in report["names"]})
    sums = f"uses of removed names: {len(uses) or 'none'}; files: {report['files']}"
    sums += f", {files} with such names" * bool(uses)
    sums += f", not read: {len(report['not_read'])}" * bool(report["not_read"])
    return [*text, f"{report['asked']}: {sums} ({report['seconds']:.1f} s)"]


def _place(row: dict[str, Any]) -> str:
    cell = f":cell {row['cell']}" if row["cell"] else ""
    return f"{row['file']}{cell}" + f":{row['line']}" * bool(row["line"])


def _files(top: Path, unread: Rows) -> Iterator[Path]:
    """Finds sources and notebooks; links of folders are not followed."""

    def note(error: OSError) -> None:
        place = {"file": str(error.filename), "cell": 0, "line": 0}
        unread.append({**place, "why": error.strerror})

    if not os.path.isdir(top):
        yield top
        return
    for folder, folders, files in os.walk(top, onerror=note):
        inside = Path(folder)
        environments = {f for f in folders if os.path.exists(inside / f / "pyvenv.cfg")}
        folders[:] = sorted(set(folders) - environments - SKIPPED)
        yield from (inside / f for f in sorted(files) if f.endswith((".py", ".ipynb")))


def _source(path: Path, info: os.stat_result) -> bytes:
    if not stat.S_ISREG(info.st_mode):
        raise Unread("it is no regular file")
    if info.st_size > MOST_BYTES:
        raise Unread(f"it is larger than {MOST_BYTES >> 20} MiB")
    return path.read_bytes()


def _cells(source: bytes) -> list[tuple[int, str]]:
    """Cells of Python in a notebook, with their numbers from 1."""
    try:
        cells = enumerate(json.loads(source)["cells"], 1)
        code = [(i, "".join(c["source"])) for i, c in cells if c["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Unread(f"it is no notebook: {error!r}") from error
    return [(i, text) for i, text in code if not FOREIGN.match(text)]


def _passed(magic: re.Match) -> str:
    return f"{magic[1]}pass" + "\n" * magic[0].count("\n")


def _parsed(source: str | bytes) -> ast.Module:
    """Parses Python, in a notebook's cell with its magic commands left out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About the strings of this source.
            try:
                return ast.parse(source)
            except SyntaxError:
                if isinstance(source, bytes):
                    raise
                return ast.parse(MAGIC.sub(_passed, source))
    except SyntaxError as error:
        raise Unread(error.msg, error.lineno or 0) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unread(str(error) or type(error).__name__, 0) from error


def _names(path: Path, source: bytes, unread: Rows) -> Rows:
    """Finds the removed names in a file; its cells share their variables."""
    cells = _cells(source) if path.suffix == ".ipynb" else [(0, source)]
    module, starts, place = ast.Module([], []), [], {"file": str(path)}
    start = 0
    for number, text in cells:
        starts.append((start, number))
        try:
            tree = _parsed(text)
        except Unread as error:
            why, line = error.args
            unread.append({**place, "cell": number, "line": line, "why": why})
        else:
            module.body += ast.increment_lineno(tree, start).body
            start += len(text.splitlines()) + 1
    rows = []
    for line, name in sorted(removed_names(module)):
        start, number = starts[bisect.bisect(starts, (line, 0)) - 1]
        rows.append(
            {**place, "cell": number, "line": line - start}
            | {"name": name.name, "removed_in": name.package, "instead": name.instead}
        )
    return rows

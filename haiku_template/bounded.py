"""Files that others may have written: regular ones, read up to a size and a depth.

What cannot be looked at is not taken for absent. A fifo is not waited for, a device is
not read, and JSON is no deeper than what recurses over it can take.
Why: docs/decisions/storage.md#bounds
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST, DEPTH = 2**24, 100  # Bytes of a file; levels of JSON.
ABSENT = errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP
DEEP = f"it is nested too deeply: {DEPTH} levels are read"


def at_home(path: str | Path) -> Path:
    """Path whose ~ is the home folder; one of no user stays, as a shell leaves it."""
    return Path(os.path.expanduser(path))


def exists(path: str | Path) -> bool:
    """Tests for a file or a folder; raises `OSError` where neither can be known.

    A path that may not be looked at is not one without a file, as Python 3.14 has it.
    """
    return _mode(path) != 0


def is_file(path: str | Path) -> bool:
    """Tests for a regular file; raises as `exists`."""
    return stat.S_ISREG(_mode(path))


def is_dir(path: str | Path) -> bool:
    """Tests for a folder; raises as `exists`."""
    return stat.S_ISDIR(_mode(path))


def is_link(path: str | Path) -> bool:
    """Tests for a symbolic link, wherever it leads; raises as `exists`."""
    return stat.S_ISLNK(_mode(path, follows=False))


def dangling(path: Path) -> str:
    """Sentence on a link that leads nowhere, of the path or above it; or ""."""
    with contextlib.suppress(OSError):  # What is to be explained says more.
        for part in (path, *path.absolute().parents):
            if is_link(part) and not exists(part):
                return f"{part} is a link to {os.readlink(part)}, and leads nowhere"
    return ""


def _mode(path: str | Path, follows: bool = True) -> int:
    try:
        return os.stat(path, follow_symlinks=follows).st_mode
    except OSError as error:
        if error.errno not in ABSENT:
            raise
    except ValueError:  # A null byte.
        pass
    return 0


def opened(path: Path, mode: str = "rb", flags: int = os.O_RDONLY) -> BinaryIO:
    """Opens a regular file, by default to read; raises `OSError` for anything else."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return open(file, mode)
    os.close(file)
    raise OSError(f"{path} is no regular file")


def contents(path: Path, most: int = MOST) -> bytes:
    """Reads a regular file; raises `OSError`, or `ValueError` beyond `most` bytes."""
    with opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Iterates over a regular file's lines from the byte `start`; raises `OSError`.

    One of more than `MOST` bytes comes in pieces of so many.
    """
    with opened(path) as file:
        file.seek(start)
        yield from iter(lambda: file.readline(MOST), b"")  # A longer one in pieces.


def parse(text: str | bytes, kind: type = object, pairs: Any = None) -> Any:
    """Parses JSON; raises `ValueError` if it is damaged, deep, or of another kind.

    `pairs` makes each object of its (key, value) pairs, by default a dictionary.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(DEEP) from error
    if text.count("[") + text.count("{") > DEPTH:
        _check_depth(value)
    if not isinstance(value, kind):
        expected = "keys" if kind is dict else kind.__name__
        raise ValueError(f"it holds a {type(value).__name__} and no {expected}")
    return value


def is_number(value: Any) -> bool:
    """Tests for a finite number that a float can hold; JSON has others."""
    return isinstance(value, int | float) and -1e300 < value < 1e300


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        items = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for xs in items for x in xs if isinstance(x, dict | list)]
        if not level:
            return
    raise ValueError(DEEP)


def read_json(path: Path, kind: type = dict, most: int = MOST) -> Any:
    """Reads a file of JSON; raises as `contents` and `parse`."""
    return parse(contents(path, most), kind)

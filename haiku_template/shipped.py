"""Folders that lie beside the package in a clone, and in `share` of an installation."""

import importlib.metadata
import re
import sys
from pathlib import Path

from haiku_template.bounded import is_dir, is_file

CLONE = Path(__file__).parents[1]
SHARE = "share/haiku_template/"


def folder(name: str) -> Path | None:
    """Finds `configs`, `skeleton` or `notebooks`; None where neither has it."""
    if is_file(CLONE / "setup.cfg") and is_dir(CLONE / name):
        return CLONE / name
    try:
        files = importlib.metadata.files("haiku_template") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:  # Wherever the scheme of the installation puts its data.
        if f"{SHARE}{name}/" in str(file):
            path = Path(file.locate()).resolve()
            return Path(str(path).partition(f"{SHARE}{name}/")[0], SHARE, name)
    return None


def config_file(name: str) -> Path | None:
    """Finds a shipped config by its name: `digits`, or `configs/digits.py`."""
    match = re.fullmatch(r"(?:configs/)?(\w+)(?:\.py)?", name)
    home = match and folder("configs")
    file = home and home / f"{match[1]}.py"
    return file if file and is_file(file) else None


def with_shipped(argv: list[str], file: Path) -> list[str] | None:
    """Names the shipped config in place of a file that is not here; None for none.

    Such configs may import one another, as `configs.NAME`.
    """
    if (found := config_file(str(file))) is None:
        return None
    sys.path.append(str(found.parents[1]))  # They may import one another.
    pattern = re.compile(rf"(\0--?config[=\0]){re.escape(str(file))}(?=[:\0]|$)")
    words = "\0".join(["", *argv])
    return pattern.sub(lambda match: f"{match[1]}{found}", words).split("\0")[1:]

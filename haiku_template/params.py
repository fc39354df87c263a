"""Haiku parameters by path: `gpt/block_0/attention/qkv/w` is module and name."""

import difflib
import fnmatch
import itertools
from collections.abc import Iterable
from typing import Any

import haiku as hk


def flatten(params: hk.Params) -> dict[str, Any]:
    """Flattens {module: {name: leaf}} to leaves by path."""
    leaves = hk.data_structures.traverse(params)
    return {f"{module}/{name}": leaf for module, name, leaf in leaves}


def unflatten(leaves: dict[str, Any]) -> hk.Params:
    """Inverse of `flatten`."""
    params: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        module, _, name = path.rpartition("/")
        params.setdefault(module, {})[name] = leaf
    return params


def matching(pattern: str, paths: Iterable[str]) -> set[str]:
    """Selects paths by a shell pattern: `*` is anything, slashes too."""
    return {path for path in paths if fnmatch.fnmatchcase(path, pattern)}


def near(name: str, names: Iterable[str]) -> str:
    """Formats `; nearest is ...` with the most similar of the names, or nothing."""
    found = difflib.get_close_matches(name, list(itertools.islice(names, 1000)), n=1)
    return f"; nearest is {found[0]}" if found else ""

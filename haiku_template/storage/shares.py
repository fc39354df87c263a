"""Digests of leaves as they lie on disk, read a piece at a time.

For leaves that span processes now in other shares than when they were saved, or only
now: no process has what their digests are of. Why: docs/decisions/storage.md#shares
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.storage import manifest as manifests
from haiku_template.storage import trees


def altered(folder: Path, manifest: dict[str, Any], paths: Collection[str]) -> set[str]:
    """Paths of the leaves in an Orbax tree whose bits are not those of the manifest.

    Raises `ConfigError` for a tree that is damaged.
    """
    leaves = [leaf for leaf in trees.leaves(folder) if leaf.name in paths]
    return {leaf.name for leaf in leaves if _is_altered(leaf, manifest)}


def _is_altered(leaf: trees.Leaf, manifest: dict[str, Any]) -> bool:
    entry = manifest["leaves"][leaf.name]
    expected = entry.get("shares") or {"": entry["digest"]}
    if None in expected.values():  # Of an earlier version.
        return False
    save = manifest["run"], manifest["step"]
    digests = {x: manifests.blank(leaf.name, leaf, save, x) for x in expected}
    for rows, values in leaf.read(leaf):
        for where, digest in digests.items():
            digest.update(manifests.bits(values[_within(where, rows)]))
    return any(digests[k].hexdigest() != digest for k, digest in expected.items())


def _within(where: str, rows: slice | tuple) -> Any:
    """Index of a share's elements among these rows of its array."""
    if not where:
        return np.s_[...]
    first, *others = manifests.slices(where)
    size = rows.stop - rows.start
    start, stop = (min(max(x - rows.start, 0), size) for x in (first.start, first.stop))
    return (slice(start, stop), *others)

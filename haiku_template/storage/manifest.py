"""Manifest of a checkpoint: names, forms and digests of its leaves, saved with them.

Why: docs/decisions/storage.md#damaged
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from haiku_template import bounded
from haiku_template.devices.layout import spans_processes
from haiku_template.params import flatten

MANIFEST = "manifest"  # Folder in a checkpoint, and the file in it.
MOST_BYTES = 2**28
FIELDS = {"run", "step", "leaves"}


def of(state: Any, run: str | None, step: int) -> dict[str, Any]:
    """Manifest of a state on the host, whose digests `Handler` computes as it saves."""
    return {"run": run, "step": step, "leaves": flatten(state)}


class Handler(ocp.JsonCheckpointHandler):
    """Writer of manifests: computes the digests beside the writing of the arrays."""

    # Why: docs/decisions/patches.md#manifest
    async def _save_fn(self, x: dict[str, Any], directory: Any) -> None:
        ids = x["run"], x["step"]
        leaves = {
            path: {"form": form(leaf), "digest": _digest(path, leaf, *ids)}
            for path, leaf in x["leaves"].items()
        }
        await super()._save_fn(x | {"leaves": leaves}, directory)


def form(leaf: Any) -> str:
    """Dtype and shape of an array: `float32[5, 4]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


# Orbax finds a handler by the classes of its arguments, and needs one of each kind.
@ocp.args.register_with_handler(Handler, for_restore=True)
class Restore(ocp.args.JsonRestore):
    """Argument of a restore: none."""


@ocp.args.register_with_handler(Handler, for_save=True)
class Save(ocp.args.JsonSave):
    """Argument of a save: a manifest, as `of` makes it."""


def _digest(path: str, leaf: Any, run: str | None, step: int) -> str | None:
    """BLAKE2b of a leaf's bits, its place and form; None if it spans processes."""
    if spans_processes(leaf):
        return None
    place = json.dumps([run, step, path, form(leaf)])
    array = np.ascontiguousarray(leaf).reshape(-1)
    digest = hashlib.blake2b(place.encode(), digest_size=16)
    digest.update(array.view(np.uint8))
    return digest.hexdigest()


def read(folder: Path) -> dict[str, Any] | None:
    """Reads the manifest of a checkpoint; None for one that was saved without.

    Raises:
      ValueError: it is damaged.
    """
    file = folder / MANIFEST / MANIFEST
    try:
        manifest = bounded.read_json(file, most=MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    leaves = manifest.get("leaves")
    is_whole = manifest.keys() == FIELDS and isinstance(leaves, dict)
    if not (is_whole and all(map(_is_entry, leaves.values()))):
        raise ValueError(f"{MANIFEST} has other fields than it was saved with")
    return manifest


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"form", "digest"}


def forms(manifest: dict[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf, by path."""
    return {path: entry["form"] for path, entry in manifest["leaves"].items()}


def altered(manifest: dict[str, Any], state: Any) -> list[str]:
    """Paths of the leaves of a restored state whose bits are not those of the save.

    Those that spanned processes when they were saved, or do now, are not compared.
    """
    ids, paths = (manifest["run"], manifest["step"]), []
    for path, leaf in flatten(state).items():
        digests = {_digest(path, leaf, *ids), manifest["leaves"][path]["digest"]}
        if None not in digests and len(digests) > 1:
            paths.append(path)
    return paths

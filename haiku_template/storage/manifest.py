"""Manifest of a checkpoint: its leaves' forms and digests, its files, facts of the run.

Why: docs/decisions/storage.md#damaged
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from haiku_template import bounded
from haiku_template.bounded import is_file
from haiku_template.devices.checks import shaped
from haiku_template.devices.layout import spans_processes
from haiku_template.params import flatten
from haiku_template.storage.workdir import COMMIT

MANIFEST = "manifest"  # Folder in a checkpoint, and the file in it.
MOST_BYTES = 2**28
FIELDS = {"run", "step", "leaves"}  # Of earlier versions.
Ids = tuple[str | None, int]  # Run and step of a save.
Facts = Callable[[int], dict[str, Any]]  # Of a step.
SEALED = FIELDS | {"facts", "files", "digest"}


def of(state: Any, run: str | None, step: int, facts: Facts) -> dict[str, Any]:
    """Manifest of a state on the host, which `Handler` completes as it saves.

    Of leaves that span processes it has this one's shares; the first has all others.
    """
    leaves = flatten(state)
    shares = {k: Shares.of(x) for k, x in leaves.items() if spans_processes(x)}
    leaves = shares if jax.process_index() else leaves | shares
    return {"run": run, "step": step, "leaves": leaves, "facts": facts}


class Shares(NamedTuple):
    """This process's shares of an array that spans several, on the host."""

    dtype: np.dtype
    shape: tuple[int, ...]
    arrays: dict[str, np.ndarray]  # By the place of each: `0:4,0:8`.

    @classmethod
    def of(cls, leaf: jax.Array, every: bool = False) -> "Shares":
        """Copies shares to the host, and each but once in all processes, or `every`."""
        shards = [x for x in leaf.addressable_shards if every or x.replica_id == 0]
        places = [place(shard.index, leaf.shape) for shard in shards]
        arrays = [np.asarray(shard.data) for shard in shards]
        return cls(leaf.dtype, leaf.shape, dict(zip(places, arrays, strict=True)))


def place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Ranges of a share along the axes of its array: `0:4,0:8`."""
    ranges = [x.indices(size) for x, size in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop, _ in ranges)


class Handler(ocp.JsonCheckpointHandler):
    """Writer of manifests: computes the digests beside the writing of the arrays."""

    # Why: docs/decisions/patches.md#manifest
    async def _save_fn(self, x: dict[str, Any], directory: Any) -> None:
        save = x["run"], x["step"]
        leaves = {path: _entry(path, leaf, save) for path, leaf in x["leaves"].items()}
        if index := x.pop("process", jax.process_index()):
            (directory / f"{MANIFEST}.{index}").write_text(json.dumps(leaves))
        else:
            self._manifest = x | {"leaves": leaves, "facts": x["facts"](x["step"])}

    def finalize(self, directory: Path) -> None:
        """Writes the manifest, once all processes have written their shares."""
        leaves = self._manifest["leaves"]
        if any("shares" in entry for entry in leaves.values()):
            _add_shares(leaves, directory)
        files = {"files": sizes(directory.parent)}
        (directory / MANIFEST).write_text(json.dumps(sealed(self._manifest | files)))


def _add_shares(leaves: dict[str, Any], directory: Path) -> None:
    for index in range(1, jax.process_count()):
        file = directory / f"{MANIFEST}.{index}"
        for path, entry in bounded.read_json(file, most=MOST_BYTES).items():
            leaves[path]["shares"] |= entry["shares"]
        file.unlink()


def _entry(path: str, leaf: Any, save: Ids) -> dict[str, Any]:
    """Entry of a leaf: its form, and the digest of its bits or of those of shares."""
    if not isinstance(leaf, Shares):
        return {"form": shaped(leaf), "digest": _digest(path, leaf, save)}
    digests = {k: _digest(path, leaf, save, x, k) for k, x in leaf.arrays.items()}
    return {"form": shaped(leaf), "digest": None, "shares": digests}


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a checkpoint's arrays, by its path."""
    paths = [x for x in sorted(Path(folder).glob("state/**/*")) if is_file(x)]
    paths = [x for x in paths if x.name != COMMIT]
    return {str(x.relative_to(folder)): x.stat().st_size for x in paths}


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Adds the digest of a manifest's other fields to it."""
    fields = {name: manifest[name] for name in sorted(SEALED - {"digest"})}
    text = json.dumps(fields, sort_keys=True).encode()
    return fields | {"digest": hashlib.blake2b(text, digest_size=16).hexdigest()}


def digest_of_batch(batch: Any) -> str:
    """BLAKE2b of the arrays of a batch, with their paths, dtypes and shapes."""
    leaves = flatten(batch).items()
    digests = [_digest(path, np.asarray(leaf), (None, 0)) for path, leaf in leaves]
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


# Orbax finds a handler by the classes of its arguments, and needs one of each kind.
@ocp.args.register_with_handler(Handler, for_restore=True)
class Restore(ocp.args.JsonRestore):
    """Argument of a restore: none."""


@ocp.args.register_with_handler(Handler, for_save=True)
class Save(ocp.args.JsonSave):
    """Argument of a save: a manifest, as `of` makes it."""


def blank(path: str, leaf: Any, save: Ids, where: str = "") -> Any:
    """BLAKE2b of a leaf's path and form, its save, and the place of a share."""
    text = json.dumps([*save, path, shaped(leaf)] + [where] * bool(where))
    return hashlib.blake2b(text.encode(), digest_size=16)


def _digest(path: str, leaf: Any, save: Ids, array: Any = None, where: str = "") -> str:
    """BLAKE2b of the bits of a leaf, or of the `array` that is a share of it."""
    digest = blank(path, leaf, save, where)
    digest.update(bits(leaf if array is None else array))
    return digest.hexdigest()


def bits(array: Any) -> np.ndarray:
    """Bytes of an array, in the order of its elements: uint8 [n]."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def read(folder: Path) -> dict[str, Any] | None:
    """Reads the manifest of a checkpoint; None for one that was saved without.

    Raises `ValueError` if it is damaged.
    """
    try:
        manifest = bounded.read_json(folder / MANIFEST / MANIFEST, most=MOST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    leaves = manifest.get("leaves")
    is_earlier = manifest.keys() == FIELDS and isinstance(leaves, dict)
    entries = leaves.values() if is_earlier else [None]
    if all(isinstance(x, dict) and {*x} == {"form", "digest"} for x in entries):
        return manifest | {"facts": {}, "files": {}}
    kinds = {type(manifest.get(name)) for name in ("leaves", "files", "facts")}
    if manifest.keys() != SEALED or sealed(manifest) != manifest or kinds != {dict}:
        raise ValueError(f"{MANIFEST} has other fields than it was saved with")
    return manifest


def check_sizes(manifest: dict[str, Any], folder: Path) -> None:
    """Raises `ValueError` for files of a checkpoint that are missing, or cut."""
    there = sizes(folder)
    for name, size in manifest["files"].items():
        if there.get(name) != size:
            fact = f"has {there[name]:,} bytes" if name in there else "is missing"
            raise ValueError(f"{name} {fact}, and had {size:,}")


def forms(manifest: dict[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf, by path."""
    return {path: entry["form"] for path, entry in manifest["leaves"].items()}


def altered(manifest: dict[str, Any], state: Any) -> list[str]:
    """Paths of the leaves of a restored state whose bits are not those of the save.

    But for those that `unaligned` gives.
    """
    skipped = {*unaligned(manifest, state)}
    leaves = {k: leaf for k, leaf in flatten(state).items() if k not in skipped}
    return [k for k, leaf in leaves.items() if _is_altered(k, leaf, manifest)]


def _is_altered(path: str, leaf: Any, manifest: dict[str, Any]) -> bool:
    entry, save = manifest["leaves"][path], (manifest["run"], manifest["step"])
    if spans_processes(leaf):
        arrays = Shares.of(leaf, every=True).arrays
    elif "shares" in entry:
        array = np.asarray(leaf)
        arrays = {where: array[slices(where)] for where in entry["shares"]}
    else:  # Those of earlier versions that spanned processes have none.
        return entry["digest"] not in (None, _digest(path, leaf, save))
    return any(
        entry["shares"][where] != _digest(path, leaf, save, array, where)
        for where, array in arrays.items()
    )


def slices(where: str) -> tuple[slice, ...]:
    """Index of the share at a place, as `place` writes it."""
    ranges = [text.split(":") for text in where.split(",")]
    return tuple(slice(int(start), int(stop)) for start, stop in ranges)


def unaligned(manifest: dict[str, Any], state: Any) -> list[str]:
    """Paths of leaves that span processes in other shares than when they were saved.

    No process has the bits that one of their digests is of.
    """
    paths = []
    for path, leaf in flatten(state).items():
        if spans_processes(leaf):
            indices = leaf.sharding.devices_indices_map(leaf.shape).values()
            places = {place(index, leaf.shape) for index in indices}
            if not places <= manifest["leaves"][path].get("shares", {}).keys():
                paths.append(path)
    return paths

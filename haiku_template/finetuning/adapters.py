"""Adapter files: trainable parameters, without the frozen ones that they belong to.

Tensors have the paths of the parameters. The metadata hold rank, alpha, step, a hash of
the frozen parameters, and the axes of those adapted that are no matrices, if any.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import haiku as hk
import numpy as np

from haiku_template.bounded import exists, is_dir, is_file, parse, read_json
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, download
from haiku_template.finetuning.lora import Lora
from haiku_template.params import flatten, unflatten
from haiku_template.pretrained.reading import read
from haiku_template.pretrained.rules import SAME_NAMES
from haiku_template.pretrained.tensors import read_headers, read_metadata
from haiku_template.pretrained.writing import new_file, save_tensors
from haiku_template.storage.files import dispensable
from haiku_template.storage.workdir import BASE, has_checkpoints, write_json

logger = logging.getLogger(__name__)

ADAPTERS = "adapters.safetensors"  # In a folder.
FACTS = {"rank": int, "alpha": float, "base_sha256": str, "step": int}  # Metadata.
AXES = "axes"  # Of tensors, as JSON; files of matrices alone have none.


def fingerprint(devices: DeviceManager, frozen: hk.Params) -> str:
    """SHA-256 of the paths, dtypes, shapes and bytes of a tree, a leaf at a time."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(frozen).items()):
        digest.update(f"{path} {leaf.dtype}{list(leaf.shape)}\n".encode())
        values = np.ascontiguousarray(devices.fetch(leaf))
        digest.update(values.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def save_adapters(
    file: str | Path,
    params: hk.Params,
    frozen: hk.Params,
    lora: Lora,
    devices: DeviceManager,
    *,
    step: int,
) -> None:
    """Writes trainable parameters to a new file; raises as `new_file`."""
    with new_file(Path(file)) as partial:
        facts = lora.rank, lora.alpha, fingerprint(devices, frozen), step
        metadata = dict(zip(FACTS, map(str, facts), strict=True))
        metadata |= {AXES: json.dumps(dict(lora.axes))} if lora.axes else {}
        save_tensors(partial, devices.fetch(flatten(params)), metadata)


def read_facts(file: Path) -> dict[str, Any]:
    """Reads an adapter file's `FACTS` and `AXES`, or raises `ConfigError`."""
    read_headers(file)  # Raises one sentence if damaged.
    metadata = read_metadata(file)
    try:
        axes = {AXES: tuple(parse(metadata.get(AXES, "{}")).items())}
        return {key: convert(metadata[key]) for key, convert in FACTS.items()} | axes
    except (KeyError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file} holds no adapters: its metadata do not give {', '.join(FACTS)}"
        ) from error


def load_adapters(  # Why: docs/decisions/finetuning.md#adapters
    file: str | Path,
    skeleton: hk.Params,
    frozen: hk.Params,
    lora: Lora,
    devices: DeviceManager,
    place: Callable[[str, Any], Any] | None = None,
    skip: Collection[str] = (),
) -> hk.Params:
    """Reads a file of `save_adapters`, or a folder's `ADAPTERS`: all of it or nothing.

    `skeleton` has the shapes and dtypes of the trainable parameters, which `place` puts
    on the devices, less those of `skip`, as `pretrained.read` does. Raises
    `ConfigError` if the file is damaged, has no adapters, or those of other frozen
    parameters, rank, alpha, axes or shapes.
    """
    file = Path(file) / ADAPTERS if is_dir(file) else Path(file)
    if not is_file(file):
        raise ConfigError(
            f"{file} is not there; python -m haiku_template.export --format=adapters "
            "writes such a file from a run" + download(file)
        )
    facts = read_facts(file)
    for key in ("rank", "alpha", AXES):
        there, here = facts[key], getattr(lora, key)
        if there != here:
            raise ConfigError(
                f"the adapters in {file} have {key} {there}, and here it is {here}"
            )
    digest = fingerprint(devices, frozen)
    check_frozen(facts["base_sha256"], digest, f"the adapters in {file}")
    leaves = read(file, skeleton, [SAME_NAMES], devices, skip=skip, place=place)
    return unflatten(leaves)


def check_frozen(expected: str, digest: str, params: str) -> None:
    """Raises `ConfigError` if a SHA-256 is not the one that `params` expect."""
    if digest != expected:
        raise ConfigError(
            f"{params} were trained with other frozen parameters: their SHA-256 was "
            f"{expected[:12]}..., and here it is {digest[:12]}...; names, shapes, "
            "dtypes and values must all be the same"
        )


def check_same_frozen(devices: DeviceManager, frozen: hk.Params, workdir: Path) -> None:
    """Writes `BASE`, the SHA-256 of frozen parameters, for a new run.

    On resume it compares, and raises `ConfigError` if they are others.
    """
    file = workdir / BASE
    if not frozen:
        return
    digest = fingerprint(devices, frozen)  # Why: docs/decisions/finetuning.md#hash
    if not (exists(file) and has_checkpoints(workdir)):
        with dispensable(file):
            write_json(file, {"sha256": digest})
        return
    try:
        expected = read_json(file)["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be read (%s): whether the frozen parameters are those that the "
            "run began with is not known",
            file,
            error,
        )
    else:
        check_frozen(expected, digest, f"the parameters in {workdir}")

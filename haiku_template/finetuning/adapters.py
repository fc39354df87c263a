"""Adapter files: trainable parameters, without the frozen ones that they belong to.

Tensors have the paths of the parameters. The metadata hold rank, alpha, step and a hash
of the frozen parameters.
"""

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import numpy as np
from safetensors import SafetensorError

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning.lora import Lora
from haiku_template.params import flatten, unflatten
from haiku_template.pretrained.reading import read
from haiku_template.pretrained.rules import Rule
from haiku_template.pretrained.tensors import read_headers, read_metadata
from haiku_template.pretrained.writing import save_tensors
from haiku_template.storage.files import dispensable
from haiku_template.storage.workdir import BASE, has_checkpoints, write_atomically

logger = logging.getLogger(__name__)

ADAPTERS = "adapters.safetensors"  # In a folder.


def fingerprint(devices: DeviceManager, base: hk.Params) -> str:
    """SHA-256 of the paths, dtypes, shapes and bytes of a tree, sorted by path.

    Host memory holds one leaf at a time.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(base).items()):
        digest.update(f"{path} {leaf.dtype}{list(leaf.shape)}\n".encode())
        values = np.ascontiguousarray(devices.fetch(leaf))
        digest.update(values.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def save_adapters(
    file: str | Path,
    params: hk.Params,
    base: hk.Params,
    lora: Lora,
    devices: DeviceManager,
    *,
    step: int,
) -> None:
    """Writes trainable parameters to a new file, whole or not at all.

    Args:
      params: trainable parameters, on the devices.
      base: frozen parameters, on the devices.

    Raises:
      ConfigError: `file` exists.
      StorageError: it cannot be written.
    """
    file = Path(file)
    if file.exists():
        raise ConfigError(f"{file} exists, and nothing is overwritten")
    facts = Facts(lora.rank, lora.alpha, fingerprint(devices, base), step)
    metadata = {key: str(value) for key, value in facts._asdict().items()}
    tensors = {
        path: np.asarray(devices.fetch(leaf), order="C")
        for path, leaf in flatten(params).items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
            partial = Path(folder) / file.name
            save_tensors(partial, tensors, metadata)
            partial.rename(file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be written: {error}") from error


class Facts(NamedTuple):
    """Metadata of an adapter file; `base_sha256` is of the frozen parameters."""

    rank: int
    alpha: float
    base_sha256: str
    step: int


def read_facts(file: Path) -> Facts:
    """Reads an adapter file's metadata, or raises `ConfigError`."""
    read_headers(file)  # Raises one sentence if damaged.
    found = read_metadata(file)
    try:
        values = found["rank"], found["alpha"], found["base_sha256"], found["step"]
        return Facts(int(values[0]), float(values[1]), values[2], int(values[3]))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{file} holds no adapters: its metadata do not give "
            f"{', '.join(Facts._fields)}"
        ) from error


def load_adapters(
    file: str | Path,
    skeleton: hk.Params,
    base: hk.Params,
    lora: Lora,
    devices: DeviceManager,
) -> hk.Params:
    """Reads a file of `save_adapters`, all of it or nothing.

    Args:
      file: the file, or a folder with `ADAPTERS`.
      skeleton: shapes and dtypes of the trainable parameters.
      base: frozen parameters, on the devices.

    Raises:
      ConfigError: the file is damaged or has no adapters; or they belong to other
        frozen parameters, rank or alpha, or do not fit.
    """
    file = Path(file) / ADAPTERS if Path(file).is_dir() else Path(file)
    if not file.is_file():
        raise ConfigError(
            f"{file} is not there; python -m haiku_template.export --format=adapters "
            "writes such a file from a run"
        )
    found = read_facts(file)
    for key in ("rank", "alpha"):
        there, here = getattr(found, key), getattr(lora, key)
        if there != here:
            raise ConfigError(
                f"the adapters in {file} have {key} {there}, and here it is {here}"
            )
    check_frozen(found.base_sha256, devices, base, f"the adapters in {file}")
    rules = same_names(skeleton)
    return unflatten(read(file, skeleton, rules, devices))


def check_frozen(expected: str, devices: DeviceManager, base: Any, whose: str) -> str:
    """Asserts that frozen parameters have the expected hash, and returns it.

    Raises:
      ConfigError: they have another; `whose` names what expects it.
    """
    found = fingerprint(devices, base)
    if found != expected:
        raise ConfigError(
            f"{whose} were trained on another base: its SHA-256 was {expected[:12]}"
            f"..., and that of the base here is {found[:12]}...; names, shapes, dtypes "
            "and values of what is frozen must all be the same"
        )
    return found


def check_same_frozen(devices: DeviceManager, frozen: hk.Params, workdir: Path) -> None:
    """Asserts that a resumed run has its frozen parameters; saves a new run's hash.

    Raises:
      ConfigError: the parameters changed.
    """
    if not frozen:
        return
    file = workdir / BASE
    if file.exists() and has_checkpoints(workdir):
        try:
            expected = json.loads(file.read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "whether frozen parameters are those that the run in %s began with is "
                "not known: %s cannot be read (%s)",
                workdir,
                file,
                error,
            )
            return
        check_frozen(expected, devices, frozen, f"the parameters in {workdir}")
    else:
        found = {"sha256": fingerprint(devices, frozen)}
        with dispensable(file):
            write_atomically(file, json.dumps(found) + "\n")


def same_names(skeleton: hk.Params) -> tuple[Rule, ...]:
    """Makes the rename rules of files whose names are paths."""
    return tuple(Rule(path, path) for path in flatten(skeleton))

"""Pretrained parameters of a run: files, or another run's checkpoint."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import numpy as np

from haiku_template import pretrained
from haiku_template.bounded import exists, is_dir, is_file, read_json
from haiku_template.config import load
from haiku_template.devices import DeviceManager
from haiku_template.errors import (
    ConfigError,
    DamagedError,
    MisfitError,
    StorageError,
    download,
    some,
)
from haiku_template.finetuning.adapters import ADAPTERS
from haiku_template.finetuning.plan import Finetuning
from haiku_template.models import HUGGING_FACE, Family
from haiku_template.params import flatten, unflatten
from haiku_template.pretrained import Tensor, dtype_name, read_published
from haiku_template.registry import resolve
from haiku_template.storage import trees
from haiku_template.storage.checkpoint import BEST_OR_LATEST, Checkpoints, restore
from haiku_template.storage.workdir import CHECKPOINTS, CONFIG

logger = logging.getLogger(__name__)

STATE = pretrained.BESIDE
GROUP = 2**28  # Bytes of a run's parameters that are read at once.
# Parameters by path, on the devices; the Haiku state, or None for the seed's.
Loaded = tuple[dict[str, Any], hk.State | None]
# From shapes and dtypes of all parameters, paths to leave out, shapes of the Haiku
# state, or None to leave it out, and perhaps a function of a path and an array on the
# host that puts it on the devices, one after another; else they are replicated.
Source = Callable[..., Loaded]


def open_source(
    init_from: str | None,
    family: Family | None,
    devices: DeviceManager,
    finetuning: Finetuning | None = None,
) -> Source | None:
    """Opens the parameters that `config.init_from` names; None for None.

    It names a workdir, a folder of Hugging Face's, an exported one, an Orbax tree, or a
    file: safetensors with names of Hugging Face's or of Haiku's, or `.npz`. `family` is
    the model's, if it has one. Raises `ConfigError` if nothing is there, or no whole
    model of this family.
    """
    if init_from is None:
        return None
    check_readable(init_from)
    path, finetuning = Path(init_from), finetuning or Finetuning()
    if is_file(path / ADAPTERS):
        raise ConfigError(
            f"config.init_from={init_from} holds adapters and no whole model; give the "
            "source of their frozen parameters there, and the adapters as "
            "config.finetuning.adapters"
        )
    if is_dir(path / CHECKPOINTS):
        marked = [x for x in finetuning.fresh if x.startswith(pretrained.MARK)]
        of_files = finetuning._asdict() | {"fresh": marked}
        for key in ("rename", "ignore", "fresh"):
            if value := of_files[key]:
                raise ConfigError(
                    f"config.finetuning.{key}={value} is for the names in files, and "
                    f"config.init_from={init_from} is a workdir"
                )
        return _of_workdir(path, devices)
    if is_folder(init_from) and (family or exists(path / CONFIG)):
        _describe(path, family)
    names = pretrained.Names(finetuning.rename, finetuning.ignore, finetuning.fresh)
    rules = family.rules if family else ()
    read = functools.partial(
        read_published, path, devices=devices, rules=rules, names=names
    )
    if trees.is_tree(path):
        return functools.partial(read, list_tensors=_tensors_of_tree)
    return read


def check_readable(init_from: str) -> None:
    """Raises `ConfigError` unless something is at `config.init_from`."""
    if init_from and os.access(Path(init_from), os.R_OK):
        return
    is_there = init_from and exists(init_from)
    fault = "may not be read" if is_there else "is not there"
    raise ConfigError(
        f"config.init_from={init_from} {fault} (looked for in {Path.cwd()}); "
        "possible are a workdir, a Hugging Face or exported folder, an Orbax tree, a "
        "safetensors file or .npz; if the files were moved, edit init_from in the "
        "run's config.json" + download(init_from)
    )


def _tensors_of_tree(folder: Path) -> list[Tensor]:
    return [
        Tensor(leaf.name, leaf.file, dtype_name(leaf.dtype), leaf.shape, leaf.read)
        for leaf in trees.leaves(folder)
    ]


def trains_a_part(finetuning: Any) -> bool:
    """Tests if `config.finetuning` trains a part of the model, or adapters of it."""
    return bool(finetuning.train) or finetuning.lora.rank is not None


def is_lost(init_from: str | None) -> bool:
    """Tests for a `config.init_from` that is not there."""
    return init_from is not None and not exists(init_from)


def without_source(config: Any, family: Family | None) -> Any:
    """Config of a run that has begun, whose `init_from` is lost.

    Its checkpoints have all parameters unless some are frozen. A model of a family, or
    a vocabulary, may have its sizes from there, and keeps it.
    """
    has_size = config.data.get("vocab_size", 0) is not None
    if family or not has_size or trains_a_part(config.finetuning):
        return config
    logger.warning(
        "config.init_from=%s is not there; the parameters are those of the run's "
        "checkpoints",
        config.init_from,
    )
    config = config.copy_and_resolve_references()
    config.init_from = None
    for key in ("fresh", "ignore", "rename"):  # Of what is read from there.
        config.finetuning[key] = ()
    return config


def _of_workdir(workdir: Path, devices: DeviceManager) -> Source:
    """Opens a run's best checkpoint, or its latest: the averages if there are any."""
    if not (saved := load(workdir / CONFIG)):
        raise ConfigError(
            f"the run in {workdir} was made by a script, without a config"
        )
    if trains_a_part(saved.finetuning):
        raise ConfigError(
            f"config.init_from={workdir} is a run that trained a part of its model, "
            "and holds no more than that; export it with --format=safetensors and "
            "start from that, or with --format=adapters for config.finetuning.adapters"
        )

    def of_run(
        shapes: hk.Params,
        skip: Collection[str],
        state: Any,
        place: Callable[[str, Any], Any] = lambda path, array: devices.replicate(array),
    ) -> Loaded:
        specs = {k: v for k, v in flatten(shapes).items() if k not in skip}

        def read(checkpoints: Checkpoints, step: int) -> Loaded:
            fields = checkpoints.saved(step)
            field = "ema_params" if fields.get("ema_params") else "params"
            listed = flatten(fields[field])
            leaves: dict[str, Any] = {}
            for group in _groups(specs):
                others = {*skip, *specs} - group.keys()
                dtypes = {k: listed.get(k, leaf).dtype for k, leaf in group.items()}
                saved = {k: x.update(dtype=dtypes[k]) for k, x in group.items()}
                saved = devices.host_shapes(unflatten(saved))
                params = flatten(checkpoints.restore(step, saved, field, others))
                for path, leaf in group.items():
                    array = np.asarray(params.pop(path))
                    leaves[path] = place(path, array.astype(leaf.dtype, copy=False))
            restored = checkpoints.restore(step, state, "net_state") if state else None
            return leaves, restored

        try:
            return restore(workdir, BEST_OR_LATEST, read)[1]
        except DamagedError:
            raise
        except StorageError as error:  # Another model's, as a file would be.
            fresh = "; config.finetuning.fresh names those to start from the seed"
            fresh *= isinstance(error, MisfitError)
            raise ConfigError(f"config.init_from={workdir}: {error}{fresh}") from error

    return of_run


def _groups(specs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits leaves by path into groups of `GROUP` bytes at most, or of one leaf."""
    group, size = {}, 0
    for path, leaf in specs.items():
        if group and size + 4 * leaf.size > GROUP:
            yield group
            group, size = {}, 0
        group[path], size = leaf, size + 4 * leaf.size
    if group:
        yield group


def with_sizes(
    values: dict[str, Any], init_from: str | None, family: Family | None
) -> dict[str, Any]:
    """Completes `config.model` (keys None or absent) from a Hugging Face folder.

    Other kinds of `init_from` change nothing. A key that contradicts the folder, or a
    damaged folder, is a `ConfigError`; other heads than a run's are a warning.
    """
    if family and init_from is not None and _has_config(Path(init_from)):
        _warn_of_heads(values.get("num_heads"), Path(init_from))
    if not is_folder(init_from):
        return values
    sizes = _describe(init_from, family).arguments.items()
    sizes = {k: x for k, x in sizes if k not in ("num_outputs", "dropout")}
    for key, value in sizes.items():
        if values.get(key) not in (None, value):
            raise ConfigError(
                f"config.model.{key}={values[key]}, and the model in {init_from} has "
                f"{value}; leave the key out"
            )
    return values | sizes


def _warn_of_heads(count: int | None, path: Path) -> None:
    other = None
    with contextlib.suppress(ConfigError):  # Whoever reads the run says what is wrong.
        saved = load(path / CONFIG)
        other = saved.model.get("num_heads") if saved else None  # A script's is {}.
    if None not in (count, other) and count != other:
        logger.warning(
            f"config.model.num_heads={count}, and the run in {path} has {other}: no "
            "shape shows them, and its parameters are those of another model"
        )


def vocabulary_of(init_from: str | None, passed: tuple[str, ...] = ()) -> int | None:
    """Vocabulary size of a Hugging Face folder, or of a run whose config has it.

    Raises `ConfigError` for a run that starts from itself, by those `passed` perhaps.
    """
    if init_from in passed:
        raise ConfigError(
            f"config.init_from={init_from} starts from itself, as the config.json of "
            f"{some(passed)} says; edit init_from there to what the run started from"
        )
    if init_from is not None and _has_config(Path(init_from)):
        saved = load(Path(init_from) / CONFIG)
        size = saved and saved.data.get("vocab_size")
        return size or vocabulary_of(saved.get("init_from"), (*passed, init_from))
    if not is_folder(init_from):
        return None
    arguments = _describe(init_from).arguments
    return arguments.get("vocab_size", arguments.get("num_outputs"))


def _describe(folder: str | Path, family: Family | None = None) -> Any:
    return resolve("init_from", "describe", HUGGING_FACE)(folder, family)


def check_classes(config: Any, names: Sequence[str]) -> None:
    """Raises `ConfigError` if a classifier's folder has other classes than the data."""
    if names and is_folder(config.init_from):
        check = resolve("init_from", "check_classes", HUGGING_FACE)
        check(config.init_from, names, config.finetuning.fresh)


def is_folder(init_from: str | None) -> bool:
    """Tests if `config.init_from` names a Hugging Face folder."""
    if init_from is None or not is_dir(init_from):
        return False
    return not _has_config(Path(init_from)) and not trees.is_tree(Path(init_from))


def _has_config(path: Path) -> bool:
    """Tests for a run's config: in a workdir, or exported in Haiku's names."""
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError):
        config = None
    is_run = isinstance(config, dict) and "model_type" not in config
    return is_dir(path / CHECKPOINTS) or (is_run and "model" in config)

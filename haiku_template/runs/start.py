"""Run of a config: what `python -m haiku_template.train` does."""

import copy
import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from haiku_template import compat, preflight
from haiku_template.bounded import at_home
from haiku_template.config import (
    LOOP_KEYS,
    default_config,
    flatten,
    interval,
    keys_of,
    load,
    to_dict,
    with_tuples,
)
from haiku_template.data import without_workers
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, is_exhausted
from haiku_template.finetuning import check_classes, is_lost, without_source
from haiku_template.preflight import FIT_KEYS, NothingFits, print_budget, settle
from haiku_template.registry import resolve, users_module
from haiku_template.reporting import trackers
from haiku_template.runs import hooks, limits, loop
from haiku_template.runs.early_stop import early_stop
from haiku_template.storage.workdir import CONFIG, has_checkpoints
from haiku_template.storage.workdir import check as check_workdir
from haiku_template.training import Experiment
from haiku_template.training.experiment import family_of, make_data
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)


def run(
    config: ConfigDict,
    devices: DeviceManager,
    workdir: str,
    *,
    memory_limit: int | None = None,
    dry_run: bool = False,
    rewind: str | None = None,
    fit: str | None = None,
    profile: str | None = None,
    **options: Any,
) -> None:
    """Trains the experiment that a config describes, in a new workdir or a run's.

    `dry_run` prints the memory budget, and writes nothing; `rewind` is as `go_back`
    reads it, `fit` as in `fitted`, `profile` START:STOP; others are of `runs/loop.py`.
    """
    facts = {"--dry_run": dry_run, "--profile": profile}  # Calls are cut by it.
    facts |= {"--rewind": rewind, "--fit": fit, "--device_memory_limit": memory_limit}
    devices.processes.agree(flatten(to_dict(config), "config.") | facts)
    if config.num_epochs is not None:
        config = in_steps(config, devices)
    if profile is not None:
        options["profile"] = interval(profile, config.num_steps)
    if fit is not None:
        config = fitted(config, devices, Path(workdir), memory_limit, fit, dry_run)
        if dry_run and fit != "apply":
            return
    saved = to_dict(config)
    devices.processes.agree(flatten(saved, "config."))  # As --fit has made it.
    mirrored = bool(config.mirror) and devices.processes.first(is_copied(config.mirror))
    check_workdir(Path(workdir), saved, mirrored)
    if rewind is not None and not dry_run:
        mirror = at_home(config.mirror) if mirrored else None
        _go_back(devices, Path(workdir), rewind, mirror, config.num_steps)
    begun = False  # Asked of a run with `init_from` alone.
    if config.init_from:
        config, begun = _with_source(config, devices, Path(workdir))
    trainer = trainer_of(config, devices, begun)
    train, how = loop_of(config), loop_options(config)
    if dry_run:
        trainer = settle(trainer, Path(workdir), memory_limit)
        stop_when, num_steps = how.get("stop_when"), config.num_steps
        preflight.check_parts(trainer, config.best_metric, stop_when, num_steps)
        return print_budget(trainer, memory_limit)
    how["hooks"] = [make(trainer, Path(workdir)) for make in how["hooks"]]
    if "stop_when" in how:
        _warn_of_unsaved(config)
    if config.max_minutes is not None:
        train = limits.within(config.max_minutes, train)
    try:
        how |= {"config": saved, "memory_limit": memory_limit} | options
        train(trainer, workdir=workdir, **how)
    except (RuntimeError, ValueError) as error:  # As which JAX raises XLA's.
        _explain(error, trainer, config, Path(workdir), memory_limit)
        raise


def _with_source(
    config: ConfigDict, devices: DeviceManager, workdir: Path
) -> tuple[ConfigDict, bool]:
    """Config of a run, less an `init_from` that is lost; and whether it has begun."""
    begun = devices.processes.first(_begun(workdir, config.mirror) is not None)
    if not devices.processes.first(begun and is_lost(config.init_from)):
        return config, begun
    if config.compat:
        compat.install()  # Before the model is imported.
    return without_source(config, family_of(config.model.name)), begun


def trainer_of(
    config: ConfigDict, devices: DeviceManager, begun: bool = False
) -> Trainer:
    """Makes a run's trainer; raises `ConfigError` for data that do not fit it."""
    experiment = Experiment.from_config(config, devices)
    if config.eval_batches is not None:
        experiment = limits.with_eval_batches(experiment, config.eval_batches)
    if config.init_from is not None and not begun:
        check_classes(config, experiment.data.class_names)
    trainer = experiment.trainer(devices)
    if config.num_epochs is not None:
        _check_counted(config.batch_size, trainer.feed.batch_size)
    return trainer


def _check_counted(batch_size: int, size: int) -> None:
    if size != batch_size:
        raise ConfigError(
            f"config.num_epochs counts batches of config.batch_size={batch_size}, and "
            f"the data's are of {size}; give config.num_steps"
        )


def is_copied(mirror: str | None) -> bool:
    """True if a mirror has a run's checkpoints, and the loop can bring them back."""
    return bool(mirror) and has_checkpoints(at_home(mirror))


def loop_of(config: ConfigDict) -> Callable[..., Any]:
    """`train` of the module that `config.loop` names, by default the template's."""
    is_own = config.loop is not None
    return (users_module("loop", config.loop, "train") if is_own else loop).train


def loop_options(config: ConfigDict) -> dict[str, Any]:
    """Keyword arguments of the loop, in which hooks still wait for a trainer."""
    how = {key: config[key] for key in LOOP_KEYS}
    how["writers"] = config.writers and trackers.by_name(config.writers)
    how["hooks"] = [resolve("hooks", name, hooks.HOOKS) for name in config.hooks]
    if config.early_stop.patience is not None:
        how["stop_when"] = early_stop(**config.early_stop)
    return how


def fitted(
    config: ConfigDict,
    devices: DeviceManager,
    workdir: Path,
    limit: int | None,
    fit: str,
    dry_run: bool = True,
) -> ConfigDict:
    """Config of the cheapest change with which the run fits, printed with all tried.

    With `fit` other than `apply` it is `config` itself, which must fit unless the run
    is dry. A run that has begun keeps what it took. Raises as `preflight.fit`.
    """
    if fit == "apply":
        taken = devices.processes.first(_taken(workdir, config.mirror))
        if taken is not None:
            return _as_fitted(config, with_tuples(taken))
    to_build, _ = _with_source(config, devices, workdir)
    build = functools.partial(_changed_trainer, to_build, devices)
    limit = devices.memory_limit() if limit is None else limit
    cheapest = preflight.fit(build, workdir, limit)
    if fit == "apply":
        return with_changes(config, cheapest.changes)
    if cheapest.changes and not dry_run:
        raise ConfigError(
            f"the run does not fit as it is; it does with {cheapest.flags}, which "
            "--fit=apply takes"
        )
    return config


def _begun(workdir: Path, mirror: str | None) -> Path | None:
    """Folder that has the checkpoints of the run: its workdir, or its mirror."""
    if has_checkpoints(workdir):
        return workdir
    return at_home(mirror) if is_copied(mirror) else None


def _taken(workdir: Path, mirror: str | None) -> dict[str, Any] | None:
    """Keys as a run took them at its first start; None of one that has not begun."""
    if (begun := _begun(workdir, mirror)) is None:
        return None
    saved = flatten(load(begun / CONFIG).to_dict())
    return {key: saved[key] for key in FIT_KEYS if key in saved}


def _as_fitted(config: ConfigDict, taken: dict[str, Any]) -> ConfigDict:
    """Config with what the run took, of which the command's other values are named."""
    own, usual = flatten(keys_of(config)), flatten(keys_of(default_config()))
    for key, value in taken.items():
        if own.get(key) not in (value, usual.get(key)):
            text = "--fit=apply keeps config.%s=%s, with which the run began; not %s"
            logger.warning(text, key, value, own.get(key))
    return with_changes(config, taken)


def _go_back(
    devices: DeviceManager, workdir: Path, steps: str, mirror: Path | None, last: int
) -> None:
    from haiku_template.runs.rewind import go_back
    from haiku_template.storage.mirror import bring_back

    if devices.processes.index == 0:
        if mirror is not None:  # What is lost has to be back before.
            bring_back(workdir, mirror)
        go_back(workdir, steps, mirror, last)
    devices.processes.first(None)  # All wait for it.


def _warn_of_unsaved(config: ConfigDict) -> None:
    saves, evaluates = config.save_every, config.eval_every
    if evaluates is None:
        logger.warning(
            "config.early_stop.patience counts evaluations, and config.eval_every=None "
            "makes one, at the end"
        )
    if config.keep_best and loop.Intervals(None, evaluates, saves).some_unsaved:
        logger.warning(
            f"config.save_every={saves}: the step whose {config.early_stop.metric} is "
            f"best may not be saved; config.save_every={evaluates} saves each that is "
            "evaluated"
        )


def _explain(
    error: Exception, trainer: Trainer, config: Any, workdir: Path, limit: int | None
) -> None:
    """Raises `MemoryFullError` for an error of XLA's that means it."""
    from haiku_template.runs.exhausted import explained

    if is_exhausted(error):
        build = functools.partial(_changed_trainer, config, trainer.devices)
        raise explained(error, trainer, build, workdir, limit) from None


def _changed_trainer(
    config: ConfigDict, devices: DeviceManager, changes: dict[str, Any]
) -> Trainer:
    changed = with_changes(config, changes)
    return Experiment.from_config(changed, devices).trainer(devices)


def fit_targets(
    config: ConfigDict,
    targets: dict[str, DeviceManager],
    workdir: Path,
    limit: int | None,
) -> None:
    """Prints for each target what each change needs, and the cheapest that fits."""
    for name, devices in targets.items():
        print(f"target    {name}")
        try:
            fitted(config, devices, workdir, limit, "true")
        except NothingFits as error:
            print(f"fit       {error}")


def with_changes(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """Copies a config, with other values of some keys, such as `model.remat`."""
    config = copy.deepcopy(config)  # With its references, which follow.
    for key, value in changes.items():
        config_path.set_value(key, config, value, accept_new_attributes=True)
    return config


def in_steps(config: ConfigDict, devices: DeviceManager) -> ConfigDict:
    """Sets `num_steps` so that the run passes `num_epochs` times through its data.

    Each example is in as many batches as there are whole epochs, or more: data that
    are shuffled in blocks (`block_steps`) end with a whole one. Raises `ConfigError`
    for data whose number of examples is not known.
    """
    dataset = without_workers(make_data(config, *devices.processes[:2]).train)
    if (size := getattr(dataset, "num_examples", None)) is None:
        raise ConfigError(
            f"config.num_epochs={config.num_epochs:g} needs a training set of a known "
            f"size, and a {type(dataset).__name__} has no num_examples; give "
            "config.num_steps, or your data set that attribute"
        )
    if getattr(dataset, "order", None) == "random":
        logger.warning(
            "config.num_epochs counts windows, which are drawn at random: one epoch "
            "leaves out about a third of the tokens; config.data.order='epochs' gives "
            "each of them once an epoch"
        )
    block = getattr(dataset, "block_steps", 1)
    whole = _steps_of(math.floor(config.num_epochs), size, config.batch_size * block)
    steps = _steps_of(config.num_epochs, size, config.batch_size)
    return with_changes(config, {"num_steps": max(1, steps, whole * block)})


def _steps_of(epochs: float, size: int, batch_size: int) -> int:
    return math.ceil(epochs * size / batch_size - 1e-6)

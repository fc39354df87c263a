"""Run of a config: what `python -m haiku_template.train` does."""

from pathlib import Path

from ml_collections import config_dict

from haiku_template.config import LOOP_KEYS, flatten, to_dict
from haiku_template.devices import DeviceManager
from haiku_template.preflight import print_budget, settle
from haiku_template.registry import module, resolve
from haiku_template.runs import loop
from haiku_template.runs.early_stop import early_stop
from haiku_template.storage.workdir import check as check_workdir
from haiku_template.training import Experiment


def run(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    workdir: str,
    *,
    memory_limit: int | None = None,
    profile: tuple[int, int] | None = None,
    dry_run: bool = False,
) -> None:
    """Trains the experiment that a config describes, in a new workdir or a run's.

    `memory_limit` is in bytes on each device; None asks JAX. `profile` traces the steps
    after its first number, up to the second. `dry_run` prints the memory budget and
    writes nothing. Raises as `train` and `Experiment.from_config`.
    """
    saved = to_dict(config)
    check_workdir(Path(workdir), saved)
    devices.processes.agree(flatten(saved, "config.") | {"--dry_run": dry_run})
    trainer = Experiment.from_config(config, devices).trainer(devices)
    if dry_run:
        trainer = settle(trainer, Path(workdir), memory_limit)
        return print_budget(trainer, memory_limit)
    keys = {key: config[key] for key in LOOP_KEYS}
    how = {"memory_limit": memory_limit, "profile": profile}
    how["writers"] = tuple(resolve("writers", name, {}) for name in config.writers)
    if config.early_stop.patience is not None:
        how["stop_when"] = early_stop(**config.early_stop)
    train = module("loop", config.loop, loop, "train").train  # `runs/loop.py`.
    train(trainer, workdir=workdir, config=saved, **how, **keys)

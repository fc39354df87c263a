"""Restoring a checkpoint of a run, which may be alive."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from haiku_template.errors import ConfigError, StorageError
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.workdir import (
    CHECKPOINTS,
    CONFIG,
    is_locked,
    read_json,
    run_id,
)

BEST_OR_LATEST = "best or latest"  # The best, where any was evaluated.
REPLACED_TRIES, REPLACED_SECONDS = 20, 0.5  # Beside a run that saves all the time.


def restore(
    workdir: Path, which: str, read: Callable[[Checkpoints, int], Any]
) -> tuple[int, Any]:
    """Restores a run's checkpoint: its step, and what `read(checkpoints, step)` gives.

    Args:
      workdir: of the run, which may be alive.
      which: `latest`, `best`, `BEST_OR_LATEST`, or a step.
      read: reads the wanted part of the checkpoint.

    Raises:
      ConfigError: no such checkpoint.
      StorageError: it is damaged, or does not fit.
    """
    if not (workdir / CHECKPOINTS).is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints")
    tries = REPLACED_TRIES
    while True:
        try:
            return _restore_once(workdir, which, read)
        except StorageError:
            # A run that is alive may have replaced it meanwhile.
            if not tries or not is_locked(workdir):
                raise
        tries -= 1
        time.sleep(REPLACED_SECONDS)


def _restore_once(
    workdir: Path, which: str, read: Callable[[Checkpoints, int], Any]
) -> tuple[int, Any]:
    keys = ("keep_last", "keep_best", "best_metric", "best_mode")
    config = read_json(workdir / CONFIG) if (workdir / CONFIG).exists() else {}
    options = {key: config[key] for key in keys if key in config}
    options["run"] = run_id(workdir)
    with Checkpoints(workdir / CHECKPOINTS, **options) as checkpoints:
        named = {"latest": checkpoints.latest, "best": checkpoints.best}
        named[BEST_OR_LATEST] = checkpoints.best or checkpoints.latest
        step = named.get(which, int(which) if which.isdecimal() else None)
        if step not in checkpoints.steps:
            raise ConfigError(
                f"--checkpoint={which} is not in {workdir}; there are steps "
                f"{checkpoints.steps}, and best is {checkpoints.best}"
            )
        return step, read(checkpoints, step)

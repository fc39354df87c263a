"""The checkpoint that a user names, read while its run may be alive."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from haiku_template.config import ConfigError
from haiku_template.training.checkpoint import CheckpointError, Checkpoints
from haiku_template.training.workdir import CHECKPOINTS, is_locked, run_id

BEST_OR_LATEST = "best or latest"  # The best, where any was evaluated.
REPLACED_TRIES, REPLACED_SECONDS = 20, 0.5  # Beside a run that saves all the time.


def restore(
    config: config_dict.ConfigDict,
    workdir: Path,
    which: str,
    read: Callable[[Checkpoints, int], Any],
) -> tuple[int, Any]:
    """The step of a run's checkpoint, and what `read(checkpoints, step)` gives.

    Args:
      config: as saved in the workdir.
      workdir: of the run, which may be alive.
      which: `latest`, `best`, `BEST_OR_LATEST`, or a step.
      read: reads what is wanted of the checkpoint.

    Raises:
      ConfigError: no such checkpoint.
      CheckpointError: it is damaged, or does not fit.
    """
    if not (workdir / CHECKPOINTS).is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints")
    for _ in range(REPLACED_TRIES):
        try:
            return _restore_once(config, workdir, which, read)
        except CheckpointError:
            # A run that is alive may have replaced it meanwhile.
            if not is_locked(workdir):
                raise
        time.sleep(REPLACED_SECONDS)
    return _restore_once(config, workdir, which, read)


def _restore_once(
    config: config_dict.ConfigDict,
    workdir: Path,
    which: str,
    read: Callable[[Checkpoints, int], Any],
) -> tuple[int, Any]:
    keys = ("keep_last", "keep_best", "best_metric", "best_mode")
    options = {key: config[key] for key in keys} | {"run": run_id(workdir)}
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

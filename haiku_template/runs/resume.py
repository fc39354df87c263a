"""State that a run begins with: its newest checkpoint, or the first."""

import logging
from pathlib import Path
from typing import Any

from haiku_template.devices.processes import Processes, gather
from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen
from haiku_template.storage import Checkpoints
from haiku_template.storage.checkpoint import newest_whole
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)


def restored_or_first(
    trainer: Trainer, checkpoints: Checkpoints, num_steps: int, workdir: Path
) -> tuple[int, TrainState]:
    """Restores the newest whole checkpoint or initializes; returns step and state.

    Newer ones, which are damaged, are set aside. `workdir` is that of this process.

    Raises:
      ConfigError: it is beyond `num_steps`, or the frozen parameters changed.
      DamagedError: all are damaged; they stay where they are.
      StorageError: it does not fit.
    """
    start = checkpoints.latest or 0
    trainer.devices.processes.agree(
        {
            "the newest checkpoint": start,
            "num_steps": num_steps,
            "the placement of the data": trainer.feed.placement,
        }
    )
    if start > num_steps:
        raise ConfigError(
            f"{checkpoints.directory.parent} has a checkpoint of step {start}, and "
            f"num_steps is {num_steps}; a run does not go back: use another --workdir"
        )
    if start:
        start, saved = _restored(trainer, checkpoints)
        state = TrainState(**saved, frozen=trainer.initializer.frozen(trainer.layout))
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    if trainer.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir)
    return start, state


def _restored(trainer: Trainer, checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
    """Restores the newest checkpoint that is whole in all processes."""
    processes, abstract = trainer.devices.processes, trainer.abstract.saved()
    step, saved, damages = newest_whole(
        processes.first(checkpoints.steps),
        lambda step: checkpoints.restore(step, abstract),
        lambda damage: _of_all(processes, damage),
    )
    for damaged, sentence in damages.items():
        if processes.index == 0:
            name = checkpoints.set_aside(damaged)
            logger.warning(
                "%s; it is called %s now, and the run goes on from step %d",
                sentence,
                name,
                step,
            )
    return step, saved


def _of_all(processes: Processes, damage: str | None) -> str | None:
    """Gives the damage that any process found; None if none did."""
    damages = gather(damage) if processes.count > 1 else [damage]
    return next(filter(None, damages), None)

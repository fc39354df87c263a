"""State that a run begins with: its newest checkpoint, or the first."""

from pathlib import Path

from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen
from haiku_template.storage import Checkpoints
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer


def restored_or_first(
    trainer: Trainer, checkpoints: Checkpoints, num_steps: int, workdir: Path
) -> tuple[int, TrainState]:
    """Restores the newest checkpoint or initializes; returns the step and its state.

    `workdir` is that of this process.

    Raises:
      ConfigError: it is beyond `num_steps`, or the frozen parameters changed.
      StorageError: it is damaged, or does not fit.
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
        saved = checkpoints.restore(start, trainer.abstract.saved())
        state = TrainState(**saved, frozen=trainer.initializer.frozen(trainer.layout))
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    if trainer.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir)
    return start, state

"""State that a run begins with: its newest checkpoint, or the first."""

import functools

from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen
from haiku_template.storage import Checkpoints
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer


def restored_or_first(
    trainer: Trainer, checkpoints: Checkpoints, num_steps: int
) -> tuple[int, TrainState]:
    """Restores the newest checkpoint or initializes; returns the step and its state.

    Raises:
      ConfigError: it is beyond `num_steps`, or the frozen parameters changed.
      StorageError: it is damaged, or does not fit.
    """
    start, workdir = checkpoints.latest or 0, checkpoints.directory.parent
    trainer.devices.processes.agree(
        {
            "the newest checkpoint": start,
            "num_steps": num_steps,
            "the placement of the data": trainer.feed.placement,
        }
    )
    if start > num_steps:
        raise ConfigError(
            f"{workdir} has a checkpoint of step {start}, and num_steps is "
            f"{num_steps}; a run does not go back: use another --workdir"
        )
    if start:
        read = functools.partial(checkpoints.restore, start)
        saved = trainer.devices.load(read, trainer.abstract.saved(), trainer.layout)
        state = TrainState(**saved, frozen=trainer.initializer.frozen(trainer.layout))
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    if trainer.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir)
    return start, state

"""State that a run begins with: its newest checkpoint, or the first."""

from haiku_template.data import each_shape
from haiku_template.devices import canonical_shapes
from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen, from_features
from haiku_template.models.forms import inputs_of
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
            "the placement of the data": trainer.placement,
        }
    )
    if start > num_steps:
        raise ConfigError(
            f"{workdir} has a checkpoint of step {start}, and num_steps is "
            f"{num_steps}; a run does not go back: use another --workdir"
        )
    if start:
        saved = checkpoints.restore(start, trainer.abstract.saved())
        state = TrainState(**saved, frozen=trainer.frozen())
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    whole, base = trainer.through or (trainer, None)
    if whole.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir, base)
    return start, state


def with_features(trainer: Trainer) -> Trainer:
    """Makes the trainer that begins at `finetuning.features`; the same without any.

    They are computed if they are not there yet. Raises as `from_features`.
    """
    if trainer.experiment.finetuning.features is None:
        return trainer
    if trainer.devices.processes.count > 1:
        raise ConfigError(
            "config.finetuning.features are computed and read by one process; leave "
            "out --num_processes, or train through the trunk"
        )
    example = canonical_shapes(each_shape(trainer.experiment.data.train)[0])
    inputs = inputs_of(example, trainer.task.whole_batch)
    experiment, base = from_features(trainer, trainer.model_init, inputs)
    made = type(trainer)(experiment, trainer.devices)
    made.through = trainer, base
    return made

"""Evaluates a checkpoint of a run, from what its workdir holds."""

from pathlib import Path

from ml_collections import config_dict

from haiku_template.config import ConfigError
from haiku_template.devices import DeviceManager
from haiku_template.training import report
from haiku_template.training.experiment import build
from haiku_template.training.restoring import restore


def evaluate_checkpoint(
    config: config_dict.ConfigDict, devices: DeviceManager, workdir: Path, which: str
) -> tuple[int, dict[str, float]]:
    """The step and the metrics of one checkpoint of a run.

    Where classes are told apart, confusion.png in `workdir` shows which are not.

    Args:
      config: as saved in the workdir.
      devices: any; the run may have used others.
      workdir: of the run.
      which: `latest`, `best`, or a step.

    Raises:
      ConfigError: no such checkpoint, or nothing to evaluate on.
      CheckpointError: the checkpoint is damaged.
    """
    config.data.placement = "host"
    # Rows of padding make up for a batch that does not split over these devices.
    config.batch_size += -config.batch_size % (
        devices.num_devices * config.accumulate_steps
    )
    program = build(config, devices)
    if program.data.evaluation is None:
        raise ConfigError(f"the data set {config.data.name} has nothing to evaluate on")
    abstract = devices.abstract(program.init)
    step, state = restore(
        config, workdir, which, lambda saved, step: saved.restore(step, abstract)
    )
    with devices.explicit_transfers():
        metrics, counts = program.measure(state)
    if "confusion" in counts:
        names = program.data.class_names or range(program.data.num_outputs)
        title = f"{workdir.name}, step {step}"
        report.write_confusion(
            workdir, counts["confusion"], tuple(map(str, names)), title
        )
    return step, metrics

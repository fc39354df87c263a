"""Evaluates a checkpoint of a run, from what its workdir holds."""

from pathlib import Path

from ml_collections import config_dict

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.finetuning.adapters import ADAPTERS, read_facts
from haiku_template.finetuning.source import place_base
from haiku_template.reporting import plots
from haiku_template.storage.checkpoint import restore
from haiku_template.training.experiment import build
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Program


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
      StorageError: the checkpoint is damaged.
      ConfigError: the base is not that of the run.
    """
    program, step, state = restore_run(config, devices, workdir, which)
    if program.data.evaluation is None:
        raise ConfigError(f"the data set {config.data.name} has nothing to evaluate on")
    with devices.explicit_transfers():
        metrics, counts = program.measure(state)
    if "confusion" in counts:
        names = program.data.class_names or range(program.data.num_outputs)
        title = f"{workdir.name}, step {step}"
        plots.write_confusion(
            workdir, counts["confusion"], tuple(map(str, names)), title
        )
    return step, metrics


def restore_run(
    config: config_dict.ConfigDict, devices: DeviceManager, workdir: Path, which: str
) -> tuple[Program, int, TrainState]:
    """The program of a run, and the step and the state of one of its checkpoints.

    Args:
      config: as saved in the workdir.
      devices: any; the run may have used others.
      workdir: of the run; or a folder of exported adapters.
      which: `latest`, `best`, or a step.

    Raises:
      ConfigError: no such checkpoint.
      StorageError: the checkpoint is damaged.
      ConfigError: the base is not that of the run.
    """
    config = config.copy_and_resolve_references()
    config.data.placement = "host"
    # Rows of padding make up for a batch that does not split over these devices.
    config.batch_size += -config.batch_size % (
        devices.num_devices * config.accumulate_steps
    )
    if (workdir / ADAPTERS).is_file():
        return _restore_adapters(config, devices, workdir, which)
    program = build(config, devices)
    abstract = devices.abstract(program.init)
    step, state = restore(
        config, workdir, which, lambda saved, step: saved.restore(step, abstract)
    )
    place_base(devices, program.start, workdir)
    return program, step, state


def _restore_adapters(
    config: config_dict.ConfigDict, devices: DeviceManager, folder: Path, which: str
) -> tuple[Program, int, TrainState]:
    """The state of a run that would go on from a folder of adapters."""
    step = read_facts(folder / ADAPTERS).step
    if which not in ("latest", str(step)):
        raise ConfigError(
            f"--checkpoint={which} is not in {folder}; its adapters are of step {step}"
        )
    config.finetuning.adapters = str(folder)
    program = build(config, devices)
    return program, step, program.first_state()

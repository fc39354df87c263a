"""Runs that tests share: what a finished run's directory gives on some devices."""

import copy
import dataclasses

from haiku_template.runs import Run
from haiku_template.training.memory import place_data


def evaluated(workdir, devices, which="latest"):
    """Step and metrics of a checkpoint."""
    run = Run.open(workdir, devices, which)
    return run.step, run.evaluate()


def placed(trainer, placement, limit=None):
    """The trainer with its training data on the host, on the devices, or `auto`."""
    experiment = place_data(trainer.experiment, trainer.devices, placement, limit)
    return experiment.trainer(trainer.devices)


def with_step(trainer, step):
    """The trainer with another function of (state, batch) for a step of the run."""
    other = copy.copy(trainer)
    other.step = step
    return other


def with_data(trainer, **sets):
    """The trainer of the same experiment with another `train` or `evaluation` set."""
    return changed(trainer, data=trainer.experiment.data._replace(**sets))


def changed(trainer, **parts):
    """The trainer of the same experiment with some of its parts changed."""
    return dataclasses.replace(trainer.experiment, **parts).trainer(trainer.devices)

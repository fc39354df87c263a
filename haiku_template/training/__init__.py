"""Training: the mathematics of a step, and the loop around it."""

from haiku_template.models.losses import perplexity
from haiku_template.training.experiment import Experiment
from haiku_template.training.guards import early_stop
from haiku_template.training.loop import Event, Result, train
from haiku_template.training.tasks import (
    Task,
    classification,
    language_model,
    regression,
)
from haiku_template.training.trainer import Trainer

__all__ = [
    "Event",
    "Experiment",
    "Result",
    "Task",
    "Trainer",
    "classification",
    "early_stop",
    "language_model",
    "perplexity",
    "regression",
    "train",
]

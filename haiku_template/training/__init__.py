"""The mathematics of training: experiments, their compiled steps, tasks."""

from haiku_template.training.experiment import Experiment as Experiment
from haiku_template.training.tasks import Task as Task
from haiku_template.training.tasks import classification as classification
from haiku_template.training.tasks import own_loss as own_loss
from haiku_template.training.tasks import regression as regression
from haiku_template.training.trainer import Trainer as Trainer

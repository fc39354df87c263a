"""Training: the mathematics of a step, and the loop around it."""

from haiku_template.training.experiment import Experiment as Experiment
from haiku_template.training.guards import early_stop as early_stop
from haiku_template.training.loop import Event as Event
from haiku_template.training.loop import Result as Result
from haiku_template.training.loop import train as train
from haiku_template.training.tasks import Task as Task
from haiku_template.training.tasks import classification as classification
from haiku_template.training.tasks import own_loss as own_loss
from haiku_template.training.tasks import regression as regression
from haiku_template.training.trainer import Trainer as Trainer

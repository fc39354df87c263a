"""Storage: a run's files on disk, among them checkpoints and metrics."""

from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.metrics import read

__all__ = ["Checkpoints", "read"]

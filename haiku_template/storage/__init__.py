"""Storage: what a run leaves on disk, checkpoints and metrics among it."""

from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.metrics import read

__all__ = ["Checkpoints", "read"]

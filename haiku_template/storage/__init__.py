"""Storage: what a run leaves on disk, checkpoints and metrics among it."""

from haiku_template.storage.checkpoint import Checkpoints

__all__ = ["Checkpoints"]

"""Storage: a run's files on disk, among them checkpoints and metrics."""

from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.manifest import digest_of_batch
from haiku_template.storage.metrics import read

__all__ = ["Checkpoints", "digest_of_batch", "read"]

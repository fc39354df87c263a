"""Fine-tuning: parameters that others trained, read here and written back."""

from haiku_template.finetuning.errors import PretrainedError, StorageError
from haiku_template.finetuning.export import export_like, export_new
from haiku_template.finetuning.families import FAMILIES, Family
from haiku_template.finetuning.folder import Description, describe, to_config
from haiku_template.finetuning.pretrained import flatten, read, restore
from haiku_template.finetuning.rules import Rule

__all__ = [
    "FAMILIES",
    "Description",
    "Family",
    "PretrainedError",
    "Rule",
    "StorageError",
    "describe",
    "export_like",
    "export_new",
    "flatten",
    "read",
    "restore",
    "to_config",
]

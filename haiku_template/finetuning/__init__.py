"""Fine-tuning: parameters that others trained, and what of them trains on."""

from haiku_template.finetuning.adapters import (
    fingerprint,
    load_adapters,
    save_adapters,
)
from haiku_template.finetuning.errors import PretrainedError, StorageError, TuningError
from haiku_template.finetuning.export import export_like, export_new
from haiku_template.finetuning.families import FAMILIES, Family
from haiku_template.finetuning.folder import Description, describe, to_config
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.pretrained import flatten, read, restore
from haiku_template.finetuning.rules import Rule
from haiku_template.finetuning.tuning import Plan, Tuning, make_plan

__all__ = [
    "FAMILIES",
    "Description",
    "Family",
    "Lora",
    "Plan",
    "PretrainedError",
    "Rule",
    "StorageError",
    "Tuning",
    "TuningError",
    "describe",
    "export_like",
    "export_new",
    "fingerprint",
    "flatten",
    "load_adapters",
    "make_plan",
    "read",
    "restore",
    "save_adapters",
    "to_config",
]

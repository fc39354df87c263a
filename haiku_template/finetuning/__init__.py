"""Fine-tuning: parameters that others trained, and what of them trains on."""

from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning.adapters import fingerprint, load_adapters, save_adapters
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Plan, Tuning, make_plan
from haiku_template.pretrained.families import FAMILIES, Family
from haiku_template.pretrained.folder import Description, describe, to_config
from haiku_template.pretrained.reading import flatten, read, restore
from haiku_template.pretrained.rules import Rule
from haiku_template.pretrained.writing import export_like, export_new

__all__ = [
    "FAMILIES",
    "Description",
    "Family",
    "Lora",
    "Plan",
    "ConfigError",
    "Rule",
    "StorageError",
    "Tuning",
    "ConfigError",
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

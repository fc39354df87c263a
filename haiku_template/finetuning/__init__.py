"""Fine-tuning: trainable and frozen parameters, LoRA, pretrained parameters."""

from haiku_template.finetuning.adapters import (
    ADAPTERS,
    check_frozen,
    check_same_frozen,
    fingerprint,
    load_adapters,
    read_facts,
    save_adapters,
)
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Finetuning, Plan, make_plan, scale_updates
from haiku_template.finetuning.source import (
    STATE,
    Source,
    is_folder,
    open_source,
    vocabulary_of,
    with_sizes,
)

__all__ = [
    "ADAPTERS",
    "STATE",
    "Finetuning",
    "Lora",
    "Plan",
    "Source",
    "check_frozen",
    "check_same_frozen",
    "fingerprint",
    "is_folder",
    "load_adapters",
    "make_plan",
    "open_source",
    "read_facts",
    "save_adapters",
    "scale_updates",
    "vocabulary_of",
    "with_sizes",
]

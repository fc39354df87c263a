"""GPT-2 as a Haiku function, with a KV cache, and its names in Hugging Face's files."""

from haiku_template.models.gpt.family import FAMILY
from haiku_template.models.gpt.model import PRESETS, Cache, gpt, gpt_flops_per_token

gpt.family = FAMILY

__all__ = ["FAMILY", "PRESETS", "Cache", "gpt", "gpt_flops_per_token"]

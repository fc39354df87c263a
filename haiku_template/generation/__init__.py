"""Text from a trained language model."""

from haiku_template.generation.generator import LanguageModel, load, make_generate
from haiku_template.generation.sampling import Sampling, sample
from haiku_template.generation.text import Text, make_text

__all__ = [
    "LanguageModel",
    "Sampling",
    "Text",
    "load",
    "make_generate",
    "make_text",
    "sample",
]

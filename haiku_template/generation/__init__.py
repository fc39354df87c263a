"""Generation of text with a trained language model."""

from haiku_template.generation.generator import LanguageModel, load, make_generate
from haiku_template.generation.sampling import Sampling, sample

__all__ = [
    "LanguageModel",
    "Sampling",
    "load",
    "make_generate",
    "sample",
]

"""Training: what a step computes, and what happens between steps."""

from haiku_template.training.loop import Result, train
from haiku_template.training.tasks import (
    classification,
    language_model,
    perplexity,
    regression,
)
from haiku_template.training.trainer import Program, make_program

__all__ = [
    "Program",
    "Result",
    "classification",
    "language_model",
    "make_program",
    "perplexity",
    "regression",
    "train",
]

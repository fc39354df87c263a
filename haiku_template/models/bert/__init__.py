"""BERT encoders as a Haiku function, and their names in Hugging Face's files."""

from haiku_template.models.bert.family import FAMILY
from haiku_template.models.bert.model import bert

bert.family = FAMILY

__all__ = ["FAMILY", "bert"]

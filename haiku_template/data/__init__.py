"""Data sets: files, arrays and Grain pipelines, as functions of the step.

What a user can mend is a `ConfigError`: data that is missing, damaged or too short for
what was asked, and labels or tokens that do not fit. It names the file or the key.
"""

from haiku_template.data.dataset import (
    ArrayDataset,
    BatchSpec,
    Data,
    Dataset,
    EvaluationSet,
    GrainDataset,
    each_shape,
)
from haiku_template.data.datasets import DATASETS, digits, from_split
from haiku_template.data.files import Split
from haiku_template.data.text import TokenDataset, TokenEvaluationSet
from haiku_template.errors import ConfigError

__all__ = [
    "DATASETS",
    "ArrayDataset",
    "BatchSpec",
    "Data",
    "ConfigError",
    "Dataset",
    "EvaluationSet",
    "GrainDataset",
    "Split",
    "TokenDataset",
    "TokenEvaluationSet",
    "digits",
    "each_shape",
    "from_split",
]

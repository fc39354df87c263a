"""Data sets: files, arrays and Grain pipelines, as functions of the step.

Faults that a user can mend are a `ConfigError` that names the file or the key: missing
or damaged data, too few examples, labels or tokens that do not fit.
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

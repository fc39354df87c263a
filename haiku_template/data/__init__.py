"""Data sets: files, arrays and pipelines of others, as functions of the step.

Faults that a user can mend are a `ConfigError` that names the file or the key: missing
or damaged data, too few examples, labels or tokens that do not fit.
"""

from haiku_template.data.buckets import bucketed as bucketed
from haiku_template.data.dataset import ArrayDataset as ArrayDataset
from haiku_template.data.dataset import BatchSpec as BatchSpec
from haiku_template.data.dataset import Data as Data
from haiku_template.data.dataset import Dataset as Dataset
from haiku_template.data.dataset import EvaluationSet as EvaluationSet
from haiku_template.data.dataset import ahead as ahead
from haiku_template.data.dataset import each_shape as each_shape
from haiku_template.data.dataset import whole_batches as whole_batches
from haiku_template.data.dataset import without_workers as without_workers
from haiku_template.data.datasets import DATASETS as DATASETS
from haiku_template.data.datasets import arguments as arguments
from haiku_template.data.datasets import by_name as by_name
from haiku_template.data.datasets import digits as digits
from haiku_template.data.datasets import from_split as from_split
from haiku_template.data.files import Split as Split
from haiku_template.data.sources import GrainDataset as GrainDataset
from haiku_template.data.sources import from_iterator as from_iterator
from haiku_template.data.trees import described as described
from haiku_template.errors import ConfigError as ConfigError

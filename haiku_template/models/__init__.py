"""Models by name: a table of functions, and any function of your own.

A model function takes `num_outputs`, `axis_name` (the mesh axis, None on one device)
and the keys of `config.model` except `name`, and returns what `hk.transform` or
`hk.transform_with_state` made of a `forward(inputs, is_training)`.
"""

from collections.abc import Callable

import haiku as hk

from haiku_template.errors import ConfigError as ConfigError
from haiku_template.models.family import Family as Family
from haiku_template.models.family import Rule as Rule
from haiku_template.models.family import check_vocabulary as check_vocabulary
from haiku_template.models.forms import inputs_of as inputs_of
from haiku_template.models.forms import per_example as per_example
from haiku_template.models.forms import plain_outputs as plain_outputs
from haiku_template.models.forms import task_rng as task_rng
from haiku_template.models.mlp import mlp
from haiku_template.models.rematerialization import remat as remat
from haiku_template.models.rematerialization import repeated_blocks as repeated_blocks
from haiku_template.models.resnet import resnet

Model = hk.Transformed | hk.TransformedWithState

MODELS: dict[str, Callable[..., Model] | str] = {
    "bert": "haiku_text.models:bert",
    "gpt": "haiku_text.models:gpt",
    "mlp": mlp,
    "resnet": resnet,
}
# Functions for folders of Hugging Face's models.
HUGGING_FACE = {
    "describe": "haiku_text.huggingface:describe",
    "export": "haiku_text.huggingface:export",
    "check_classes": "haiku_text.huggingface:check_classes",
}

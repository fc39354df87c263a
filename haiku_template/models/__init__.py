"""Models by name: a table of functions, and any function of your own.

A model function takes `num_outputs`, `axis_name` (the mesh axis, None on one device)
and the keys of `config.model` except `name`, and returns what `hk.transform` or
`hk.transform_with_state` made of a `forward(inputs, is_training)`.
"""

from collections.abc import Callable

import haiku as hk

from haiku_template.errors import ConfigError
from haiku_template.models.bert import bert
from haiku_template.models.gpt import Cache, gpt, gpt_flops_per_token
from haiku_template.models.logits import LazyLogits, multiply_out
from haiku_template.models.mlp import mlp
from haiku_template.models.resnet import resnet

Model = hk.Transformed | hk.TransformedWithState

MODELS: dict[str, Callable[..., Model]] = {
    "bert": bert,
    "gpt": gpt,
    "mlp": mlp,
    "resnet": resnet,
}
# Of a training step, for each token: called with `num_outputs`, the tokens of an
# example, and the keys of `config.model`.
FLOPS_PER_TOKEN: dict[str, Callable[..., float]] = {"gpt": gpt_flops_per_token}

__all__ = [
    "FLOPS_PER_TOKEN",
    "MODELS",
    "Cache",
    "LazyLogits",
    "Model",
    "ConfigError",
    "bert",
    "gpt",
    "gpt_flops_per_token",
    "mlp",
    "multiply_out",
    "resnet",
]

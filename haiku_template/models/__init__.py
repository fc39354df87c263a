"""Models by name: a table of functions, and any function of your own.

A model function takes `num_outputs`, `axis_name` (the mesh axis, None on one device)
and the keys of `config.model` except `name`, and returns what `hk.transform` or
`hk.transform_with_state` made of a `forward(inputs, is_training)`.
"""

from collections.abc import Callable

import haiku as hk

from haiku_template.models.bert import bert
from haiku_template.models.mlp import mlp
from haiku_template.models.resnet import resnet

Model = hk.Transformed | hk.TransformedWithState

MODELS: dict[str, Callable[..., Model]] = {"mlp": mlp, "resnet": resnet, "bert": bert}

__all__ = ["MODELS", "Model", "bert", "mlp", "resnet"]

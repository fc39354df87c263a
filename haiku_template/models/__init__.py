"""Models by name: a table of functions, and any function of your own.

A model function takes `num_outputs`, `axis_name` (the mesh axis, None on one device)
and the keys of `config.model` except `name`, and returns what `hk.transform` or
`hk.transform_with_state` made of a `forward(inputs, is_training)`.
"""

from collections.abc import Callable

import haiku as hk

from haiku_template.errors import ConfigError as ConfigError
from haiku_template.models.bert import bert
from haiku_template.models.family import Family
from haiku_template.models.family import Keyword as Keyword
from haiku_template.models.family import Rule as Rule
from haiku_template.models.family import check_vocabulary as check_vocabulary
from haiku_template.models.gpt import Cache as Cache
from haiku_template.models.gpt import gpt
from haiku_template.models.gpt import gpt_flops_per_token as gpt_flops_per_token
from haiku_template.models.logits import LazyLogits as LazyLogits
from haiku_template.models.logits import multiply_out as multiply_out
from haiku_template.models.logits import plain_outputs as plain_outputs
from haiku_template.models.logits import token_losses as token_losses
from haiku_template.models.mlp import mlp
from haiku_template.models.resnet import resnet

Model = hk.Transformed | hk.TransformedWithState

MODELS: dict[str, Callable[..., Model]] = {
    "bert": bert,
    "gpt": gpt,
    "mlp": mlp,
    "resnet": resnet,
}
# Families that Hugging Face knows, by its `model_type`.
FAMILIES: dict[str, Family] = {f.model_type: f for f in (gpt.family, bert.family)}

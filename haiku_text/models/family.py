"""Model families in Hugging Face's layout: their config.json and tensors, as data."""

from collections.abc import Callable
from typing import Any, NamedTuple

from haiku_template.models import Rule

# Of each kind of layer: endings of Hugging Face's names, and of paths. The weight of
# `nn.Linear` is (out, in), that of `Conv1D` (in, out) as Haiku's is; norms of files
# that came from TensorFlow say gamma and beta.
LAYERS = {
    "embedding": {"weight": "embeddings"},
    "linear": {"weight": "w", "bias": "b"},
    "conv1d": {"weight": "w", "bias": "b"},
    "norm": {"weight": "scale", "bias": "offset", "gamma": "scale", "beta": "offset"},
}


class Keyword(NamedTuple):
    """A keyword argument of the model, and its key in config.json."""

    name: str
    key: str
    default: int | float  # For an absent key; its type is required of a present one.


class Family(NamedTuple):
    """Family of a model function, its `.family`: Hugging Face's names and sizes, FLOPs.

    Attributes:
      architectures: Hugging Face's classes whose tensors the rules know.
      keywords: sizes of the model in config.json.
      fixed: values that config.json may have for the model to be the one computed here:
        for each key a tuple, the default first.
      sizes: completes the model's keyword arguments, as from a preset.
      flops_per_token: of a training step, for MFU: called with `num_outputs`, the
        tokens of an example and the keys of `config.model`.
      describe_classes: makes what config.json says of a classifier, {} of other models,
        from parameters, the keys of `config.model` and the names of the classes.
      tables: paths of the embeddings of tokens and of positions, whose rows are the
        vocabulary and the context; None for a model that does not generate text.
    """

    model_type: str
    architectures: tuple[str, ...]
    keywords: tuple[Keyword, ...]
    fixed: Callable[[dict[str, Any]], dict[str, tuple[Any, ...]]]
    rules: tuple[Rule, ...]
    sizes: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments
    flops_per_token: Callable[..., float] | None = None
    describe_classes: Callable[..., dict[str, Any]] = lambda params, keys, names: {}
    tables: tuple[str, str] | None = None


def layer_rules(table: str) -> tuple[Rule, ...]:
    """Rename rules of layers, one a line: kind, Hugging Face's name, path.

    `skip` is for tensors that are not parameters; a kind with `?` for optional layers.
    """
    rules: list[Rule] = []
    for kind, name, *path in map(str.split, table.strip().splitlines()):
        if kind == "skip":
            rules.append(Rule(name, None))
            continue
        layer, optional = kind.removesuffix("?"), kind.endswith("?")
        for ending, leaf in LAYERS[layer].items():
            view = "transpose" if (layer, leaf) == ("linear", "w") else "same"
            rules.append(Rule(f"{name}.{ending}", f"{path[0]}/{leaf}", view, optional))
    return tuple(rules)

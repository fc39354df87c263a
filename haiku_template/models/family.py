"""Model families in Hugging Face's layout: their config.json and tensors, as data."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from haiku_template.errors import ConfigError


class Rule(NamedTuple):
    """Rename rule for the tensors whose names fit a pattern.

    In a pattern `{}` is a number, `*` is anything, and a part in square brackets may be
    missing. A later rule with the same target is for tied tensors: where a file holds
    both, they must be equal.
    """

    pattern: str
    target: str | None  # Path, `{}` standing for the numbers; None skips the tensor.
    transform: str = "same"  # Or `transpose`.
    optional: bool = False  # A model without such a parameter skips the tensor.


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


def check_vocabulary(
    model: Callable[..., Any], vocab_size: int, given: int | None
) -> None:
    """Asserts that an encoder has an embedding for each token of the data.

    `given` is its argument `vocab_size`, None for the default. A language model gets
    its vocabulary from the data, as `num_outputs`.

    Raises:
      ConfigError: it has fewer.
    """
    known = inspect.signature(model).parameters.get("vocab_size")
    size = given if given is not None else known and known.default
    if isinstance(size, int) and size < vocab_size:
        raise ConfigError(
            f"the data has tokens up to {vocab_size - 1}, and config.model.vocab_size="
            f"{size}; {vocab_size} or more is needed"
        )

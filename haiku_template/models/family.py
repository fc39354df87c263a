"""Model families in Hugging Face's layout: their config.json and tensors, as data."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Rename rule for the tensors whose names fit a pattern.

    A later rule with the same target is for tied tensors: where a file holds both, they
    must be equal.

    Attributes:
      pattern: of names in the file. `{}` is a number, `*` is anything, and what is in
        square brackets may be missing.
      target: path of the parameter, `{}` standing for the numbers; None skips the
        tensor.
      transform: `same` or `transpose`.
      optional: True skips the tensor in a model without such a parameter; False is an
        error.
    """

    pattern: str
    target: str | None
    transform: str = "same"
    optional: bool = False


class Keyword(NamedTuple):
    """A keyword argument of the model, and its key in config.json.

    `default` stands for an absent key; its type is required of a present one.
    """

    name: str
    key: str
    default: int | float


class Family(NamedTuple):
    """Family of a model function, its `.family`: Hugging Face's names and sizes, FLOPs.

    Attributes:
      model_type: Hugging Face's name of the family.
      architectures: Hugging Face's classes whose tensors the rules know.
      keywords: sizes of the model in config.json.
      fixed: values that config.json may have for the model to be the one computed here:
        for each key a tuple, the default first.
      rules: the rename table.
      sizes: completes the model's keyword arguments, as from a preset.
      flops_per_token: of a training step, for MFU: called with `num_outputs`, the
        tokens of an example and the keys of `config.model`; None where there is no
        formula.
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
    tables: tuple[str, str] | None = None


def linear_rules(pattern: str, target: str, optional: bool = False) -> tuple[Rule, ...]:
    """Rules for PyTorch's `nn.Linear`, whose weight is (out, in)."""
    return (
        Rule(f"{pattern}.weight", f"{target}/w", "transpose", optional),
        Rule(f"{pattern}.bias", f"{target}/b", "same", optional),
    )


def conv1d_rules(pattern: str, target: str) -> tuple[Rule, ...]:
    """Rules for Hugging Face's `Conv1D`, whose weight is (in, out) as Haiku's is."""
    return (
        Rule(f"{pattern}.weight", f"{target}/w"),
        Rule(f"{pattern}.bias", f"{target}/b"),
    )


def norm_rules(pattern: str, target: str) -> tuple[Rule, ...]:
    """Rules for `nn.LayerNorm`; files that came from TensorFlow say gamma and beta."""
    return (
        Rule(f"{pattern}.weight", f"{target}/scale"),
        Rule(f"{pattern}.bias", f"{target}/offset"),
        Rule(f"{pattern}.gamma", f"{target}/scale"),
        Rule(f"{pattern}.beta", f"{target}/offset"),
    )

"""Families of models: what a run asks of `.family`; and a check of vocabularies."""

import inspect
from collections.abc import Callable
from typing import NamedTuple, Protocol

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


class Family(Protocol):  # Why: docs/decisions/house.md#family
    """Family of a model function, its `.family`, such as one of `haiku_text`'s."""

    rules: tuple[Rule, ...]  # Of names in files that are not Haiku's.
    # Of a training step: called with `num_outputs` and the keys of `config.model`.
    flops_per_token: Callable[..., float] | None


def check_vocabulary(model: Callable, vocab_size: int, argument: int | None) -> None:
    """Asserts that an encoder has an embedding for each token of the data.

    `argument` is its `vocab_size`, None for the default. A language model gets its
    vocabulary from the data, as `num_outputs`. Raises `ConfigError` if it has fewer.
    """
    parameter = inspect.signature(model).parameters.get("vocab_size")
    size = argument if argument is not None else parameter and parameter.default
    if isinstance(size, int) and size < vocab_size:
        raise ConfigError(
            f"the data has tokens up to {vocab_size - 1}, and config.model.vocab_size="
            f"{size}; {vocab_size} or more is needed"
        )

"""Texts of different lengths, to be padded to few of them.

Shapes: N examples in the set, B of them in one batch over all processes, T tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from haiku_template.data.dataset import Batch, arrays_by_name
from haiku_template.errors import ConfigError

MULTIPLE = 8  # Bucket lengths are multiples of this, for faster products.


class Tokens(NamedTuple):
    """Tokens of texts in a row; the first of each, and an end: int64 [N + 1]."""

    flat: np.ndarray
    starts: np.ndarray

    @classmethod
    def create(cls, texts: Iterable[Sequence[int]], dtype: Any = np.int32) -> "Tokens":
        """Joins texts of one token or more each."""
        flat, sizes = bytearray(), array("q", [0])
        for text in texts:
            flat += np.array(text, dtype).tobytes()
            sizes.append(len(text))
        return cls(np.frombuffer(flat, dtype), np.cumsum(sizes))

    def padded(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads the texts of `rows` with zeros, int32 [B, T]; masks are bool [B, T]."""
        at = self.starts[rows][:, None] + np.arange(length)
        mask = at < self.starts[rows + 1][:, None]
        tokens = np.where(mask, self.flat.take(at, mode="clip"), 0)
        return tokens.astype(np.int32, copy=False), mask


def text_lengths(mask: np.ndarray) -> np.ndarray:
    """Counts the tokens of texts, int32 [B], by a mask [B, T] that is 0 for padding.

    Raises `ConfigError` unless all padding is on the right.
    """
    is_token = np.asarray(mask).astype(bool)
    lengths = is_token.sum(axis=1, dtype=np.int32)
    other = (is_token != (np.arange(is_token.shape[1]) < lengths[:, None])).any(axis=1)
    if other.any():
        raise ConfigError(
            f"row {other.argmax()} of the mask has padding before a token, and lengths "
            "are of texts that are padded on the right; pad them there, or give the "
            "model the mask alone"
        )
    return lengths


def with_lengths(inputs: Batch) -> Batch:  # Why: docs/decisions/models.md#lengths
    """Adds `lengths`, int32 [B], to the inputs of `Texts`; on the device."""
    return {**inputs, "lengths": inputs["mask"].sum(axis=1)}


class Texts(NamedTuple):
    """Texts with a class each, int32 [N], for an encoder; None without labels.

    Of pairs of texts `types` says for each token which text it is of, 0 or 1.
    """

    tokens: Tokens
    labels: np.ndarray | None
    types: Tokens | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each text: int64 [N]."""
        return np.diff(self.tokens.starts)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs `tokens`, `mask` and perhaps `token_types`, int32 [B, T]; labels [B].

        Labels are int32, too.
        """
        tokens, mask = self.tokens.padded(rows, length)
        inputs = {"tokens": tokens, "mask": mask.astype(np.int32)}
        if self.types is not None:
            inputs["token_types"] = self.types.padded(rows, length)[0]
        labels = None if self.labels is None else self.labels[rows]
        return arrays_by_name(inputs, labels)


class Completions(NamedTuple):
    """Prompts with their completions; `prompts` counts a prompt's tokens: int64 [N]."""

    tokens: Tokens
    prompts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each input: all but the last, which is only predicted."""
        return np.diff(self.tokens.starts) - 1

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs and labels int32 [B, T], one token apart; `loss_mask` bool [B, T]."""
        tokens, mask = self.tokens.padded(rows, length + 1)
        mask &= np.arange(length + 1) >= self.prompts[rows][:, None]
        names = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
        return names | {"loss_mask": mask[:, 1:]}


def choose_lengths(
    sizes: np.ndarray, count: int, most: int, longest: int
) -> tuple[int, ...]:
    """Chooses lengths of `count` buckets or fewer, of about as many examples each.

    They rise, to that of the `longest`; all are multiples of 8, or `most`.
    """
    if count < 1:
        raise ConfigError(f"num_buckets={count}; possible is 1 or more")
    edges = [*np.quantile(sizes, np.arange(1, count) / count, method="higher"), longest]
    rounded = {int(-(-edge // MULTIPLE) * MULTIPLE) for edge in edges}
    return tuple(sorted({min(length, most) for length in rounded}))

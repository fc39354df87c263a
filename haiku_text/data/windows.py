"""Data set `tokens`: windows of token files, as functions of the step.

Shapes: B windows in one batch over all processes, T tokens in each (`context`).
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.bounded import is_dir, is_file
from haiku_template.data.dataset import Batch, BatchSpec, Data, epochs
from haiku_template.data.files import data_path
from haiku_template.errors import ConfigError
from haiku_text.data.files import open_tokens
from haiku_text.data.permutation import permute
from haiku_text.data.stream import TokenStream
from haiku_text.data.tokenizer import FILE, Tokenizer

PADDING = 128  # Vocabularies are rounded up to multiples of this, for faster products.
LOOKED_AT = 2**20  # Tokens at a time, when all of them are.
ORDERS = ("random", "epochs")


def tokens(
    spec: BatchSpec,
    *,
    path: str | None = None,  # .safetensors, .npy, .bin, or a folder: one stream.
    context: int = 1024,  # T, tokens of a window's inputs.
    order: str = "random",  # Or `epochs`, as in `TokenDataset`.
    vocab_size: int | None = None,  # The tokenizer's, or padded by less than 128.
    dtype: str = "uint16",  # Of .bin files.
    tensor: str | None = None,  # Name of the tokens in .safetensors files.
    validation_path: str | None = None,  # Evaluate on this, and train on all of `path`.
    validation_fraction: float = 0.01,  # Else on this part of its end; 0 for none.
    validation_tokens: int | None = None,  # Else on so many at its end; 0 for none.
    eval_windows: int | None = 1024,  # At most, spread evenly; None means all.
) -> Data:
    """Token files of any size: mapped into memory, never read whole.

    A tokenizer.json beside `path` says the size of the vocabulary.
    """
    kinds = "a .safetensors, .npy or .bin file of tokens, or a folder of them"
    source = data_path(path, "tokens", kinds)
    open_files = functools.partial(open_tokens, dtype=dtype, tensor=tensor)
    training, held_out = open_files(source, random=True), None
    if validation_path is not None:
        validation = data_path(validation_path, "tokens", kinds, "validation_path")
        held_out = open_files(validation, random=False)
    elif count := _count_held_out(training, validation_fraction, validation_tokens):
        # Mapped once more: evaluation goes forward, and reading ahead helps it.
        forward, end = open_files(source, random=False), len(training)
        held_out = forward.section(end - count, end)
        training = training.section(0, end - count)
    beside = (source if is_dir(source) else source.parent) / FILE
    tokenizer = Tokenizer(beside) if is_file(beside) else None
    size = _vocab_size(vocab_size, tokenizer, source)
    train = TokenDataset(training, context, spec, size, order)
    evaluation = held_out and TokenEvaluationSet(
        held_out, context, spec.batch_size, size, eval_windows
    )
    return Data(train, evaluation, size, widen, tokenizer and tokenizer.name)


def _count_held_out(stream: TokenStream, fraction: float, count: int | None) -> int:
    amount = f"tokens={count}"
    if count is None:
        amount = f"fraction={fraction}"
        count = math.floor(len(stream) * fraction) if 0 <= fraction < 1 else -1
        count = count or int(fraction > 0)
    if 0 <= count < len(stream):
        return count
    raise ConfigError(
        f"validation_{amount} of the {len(stream)} tokens from {stream.locate(0)} on "
        "leaves none to train on; hold out a smaller part, or 0 for none"
    )


def _vocab_size(argument: int | None, tokenizer: Tokenizer | None, source: Path) -> int:
    if tokenizer is None:
        if argument is None or argument < 1:
            raise ConfigError(
                f"vocab_size={argument}, and beside {source} lies no tokenizer.json; "
                "give --config.data.vocab_size (50257 for GPT-2's, of nanoGPT)"
            )
        return argument
    size = tokenizer.size
    if argument is not None and not size <= argument < size + PADDING:
        raise ConfigError(
            f"vocab_size={argument}, and the tokenizer {tokenizer.name} has {size} "
            f"tokens; possible is {size}, or more by less than {PADDING} as padding"
        )
    return argument or size


def widen(inputs: Any) -> Any:
    """Casts tokens of any width to int32; on the device, so that few bytes travel."""
    return inputs.astype(np.int32)


class _Windows:
    """Windows of `tokens`, those of a batch at `rows(index)`."""

    @property
    def num_examples(self) -> int:
        """Windows that hold each token once, as an epoch has them."""
        return _count(self.tokens, self.context)

    def batch(self, index: int) -> Batch:
        """Copies a batch, or this process's share: [B, T] in the dtype of the files."""
        rows = self.rows(index)
        windows = self.tokens.windows(rows, self.context + 1)
        _check_vocabulary(self.tokens, windows, rows, self.vocab_size)
        # Two arrays of their own: what changes one must not change the other.
        return {"inputs": windows[:, :-1].copy(), "labels": windows[:, 1:].copy()}


@dataclasses.dataclass(frozen=True)
class TokenDataset(_Windows):
    """Windows of T + 1 tokens, T the context: T inputs, as labels the token after each.

    Order `random` draws each window from anywhere. Order `epochs` cuts the stream into
    windows that overlap by one token, and gives each of them once an epoch, shuffled
    anew; fewer than T tokens at the end are left out. A token that is not below
    `vocab_size` is a `ConfigError` of its batch.
    """

    tokens: TokenStream
    context: int
    spec: BatchSpec
    vocab_size: int
    order: str = "random"

    def __post_init__(self) -> None:
        _count(self.tokens, self.context, "train on")
        self.spec.check(2 * self.tokens.dtype.itemsize * (self.context + 1))
        if self.order not in ORDERS:
            possible = f"possible are {', '.join(ORDERS)}"
            raise ConfigError(f"order={self.order!r} is not known; {possible}")

    def rows(self, step: int) -> np.ndarray:
        """Starts of this process's windows in `step`: int64 [B / processes]."""
        if self.order == "epochs":
            starts = epochs(self.num_examples, self.spec, step, permute) * self.context
        else:
            rng = np.random.default_rng((self.spec.seed, 0, step))
            last = len(self.tokens) - self.context
            starts = rng.integers(last, size=self.spec.batch_size)
        # Drawn for the whole batch, so that shares are parts of the same batch.
        return starts[self.spec.share()]

    @property
    def staged_size(self) -> tuple[int, int]:
        """Rows and bytes to stage on the devices."""
        return len(self.tokens), len(self.tokens) * self.tokens.dtype.itemsize

    def staged(self) -> Batch:
        """All tokens, checked against the vocabulary, which `gather` reads from."""
        flat = self.tokens.array
        for start in range(0, len(flat), LOOKED_AT):
            window = flat[None, start : start + LOOKED_AT]
            _check_vocabulary(self.tokens, window, np.array([start]), self.vocab_size)
        return {"tokens": flat}

    def gather(self, arrays: Batch, rows: Any) -> Batch:
        """Gathers the windows that start at `rows`, of NumPy or JAX arrays."""
        windows = arrays["tokens"][rows[:, None] + np.arange(self.context + 1)]
        return {"inputs": windows[:, :-1], "labels": windows[:, 1:]}


@dataclasses.dataclass(frozen=True)
class TokenEvaluationSet(_Windows):
    """Windows in order, as those of an epoch; only the last batch may have fewer.

    At most `num_windows` of them, spread evenly; None means all.
    """

    tokens: TokenStream
    context: int
    batch_size: int
    vocab_size: int
    num_windows: int | None = None

    def __post_init__(self) -> None:
        _count(self.tokens, self.context, "evaluate on")
        if self.num_windows is not None and self.num_windows < 1:
            setting = f"eval_windows={self.num_windows}"
            raise ConfigError(f"{setting}; possible is 1 or more, or None for all")

    def rows(self, index: int) -> np.ndarray:
        """Starts of the windows of one batch: int64 [B], fewer in the last."""
        every, some = self.num_examples, self._num_windows
        start = index * self.batch_size
        turns = np.arange(start, min(start + self.batch_size, some))
        # turns * every // some, without leaving 64 bits.
        return (turns * (every // some) + turns * (every % some) // some) * self.context

    @property
    def _num_windows(self) -> int:
        every = self.num_examples
        return every if self.num_windows is None else min(every, self.num_windows)

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each window once."""
        return -(-self._num_windows // self.batch_size)


def _count(tokens: TokenStream, context: int, purpose: str = "read") -> int:
    """Number of windows that fit and overlap by one token; one is the least."""
    if context < 1:
        raise ConfigError(f"context={context}; possible is 1 or more")
    if len(tokens) <= context:
        supply = f"there are {len(tokens)} to {purpose}, from {tokens.locate(0)} on"
        demand = f"context={context} needs windows of {context + 1} tokens"
        raise ConfigError(f"{demand}, and {supply}")
    return (len(tokens) - 1) // context


def _check_vocabulary(
    tokens: TokenStream, windows: np.ndarray, rows: np.ndarray, vocab_size: int
) -> None:
    # Two numbers first: in nearly every batch they are all that is looked at.
    if windows.min() >= 0 and windows.max() < vocab_size:
        return
    row, column = np.argwhere((windows < 0) | (windows >= vocab_size))[0]
    raise ConfigError(
        f"{tokens.locate(int(rows[row] + column))}, is {windows[row, column]}; the "
        f"vocabulary has {vocab_size} tokens, 0 to {vocab_size - 1}"
    )

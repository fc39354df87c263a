"""Packing: short examples share a window, where none sees another.

Shapes: N examples in the set, B windows in one batch over all processes, T tokens.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from haiku_template.data.dataset import Batch, BatchSpec, epochs
from haiku_template.errors import counted
from haiku_text.data.texts import Completions


# Why: docs/decisions/data.md#packing
def pack(sizes: np.ndarray, context: int) -> np.ndarray:
    """Packs by first fit, the longest first: the window of each example, int64 [N].

    Sizes are 1 to `context`; equal ones keep their order.
    """
    order = np.argsort(-sizes, kind="stable")
    windows, start = np.empty(len(sizes), np.int64), 0
    room = np.empty(0, np.int64)  # Of each window.
    # A size at a time: each window in turn takes as many of these as fit.
    for size, count in zip(*np.unique(-sizes, return_counts=True), strict=True):
        room = np.append(room, np.full(-(-count // (context // -size)), context))
        counts = np.diff(np.minimum(np.cumsum(room // -size), count), prepend=0)
        examples = order[start : start + count]
        windows[examples] = np.repeat(np.arange(len(room)), counts)
        room, start = room + size * counts, start + count
        room = room[room < context]  # Without those that stayed empty.
    return windows


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """Shuffled batches of windows, all full, each window once an epoch.

    Which examples share a window is decided once, by their sizes alone.
    """

    examples: Completions
    context: int
    spec: BatchSpec
    any_length: ClassVar[bool] = True  # Have examples; the windows have one.

    def __post_init__(self) -> None:
        self.spec.check(13 * self.context)

    @functools.cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Examples in the order of windows, and the first of each, and an end."""
        windows = pack(self.examples.sizes, self.context)
        starts = np.append(0, np.cumsum(np.bincount(windows)))
        return np.argsort(windows, kind="stable"), starts

    @property
    def num_examples(self) -> int:
        """Windows in an epoch."""
        return len(self._windows[1]) - 1

    @property
    def note(self) -> str:
        """Describes how full the windows are."""
        count, windows = len(self.examples.sizes), self.num_examples
        return (
            f"{counted(count, 'examples')} packed into {counted(windows, 'windows')} "
            f"of {counted(self.context, 'tokens')}, "
            f"{self.examples.sizes.sum() / (windows * self.context):.1%} full"
        )

    def batch(self, step: int) -> Batch:
        """Makes this process's share of a batch: arrays [B / processes, T].

        Inputs are `tokens` and `segments`, int32: the examples of a window count from
        1, and what is left at its end has 0. `labels` and `loss_mask` as unpacked.
        """
        order, starts = self._windows
        windows = epochs(self.num_examples, self.spec, step)[self.spec.share()]
        examples = np.concatenate([order[starts[i] : starts[i + 1]] for i in windows])
        counts = np.diff(starts)[windows]
        (flat, first), prompts = self.examples.tokens, self.examples.prompts[examples]
        sizes = self.examples.sizes[examples]
        example_ids = np.repeat(np.arange(len(examples)), sizes)  # Of each token.
        before = np.cumsum(sizes) - sizes
        within = np.arange(len(example_ids)) - before[example_ids]
        row = np.repeat(np.arange(len(windows)), counts)
        number = np.arange(len(examples)) - (np.cumsum(counts) - counts)[row]
        begin = before - before[np.cumsum(counts) - counts][row]
        at = row[example_ids], begin[example_ids] + within
        source = first[examples][example_ids] + within
        tokens, segments, labels = np.zeros((3, len(windows), self.context), np.int32)
        loss_mask = np.zeros(tokens.shape, bool)
        tokens[at], labels[at] = flat[source], flat[source + 1]
        segments[at] = number[example_ids] + 1
        loss_mask[at] = within + 1 >= prompts[example_ids]
        inputs = {"tokens": tokens, "segments": segments}
        return {"inputs": inputs, "labels": labels, "loss_mask": loss_mask}

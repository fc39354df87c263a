"""Token streams: one or many files in a row, from which windows are copied.

Shapes: B windows, T tokens in each.
"""

import bisect
import functools
import itertools
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from haiku_template.errors import ConfigError

RELEASE_EVERY = 1024  # Windows; each brings in up to 128 KiB of cached pages.


class Shard(NamedTuple):
    """Tokens in a row, read-only: of a file, after its `first` ones, or of memory.

    `mapping` is of the whole file, with `offset` bytes before the first of its tokens.
    """

    tokens: np.ndarray
    name: str
    first: int = 0
    mapping: mmap.mmap | None = None
    offset: int = 0

    def section(self, start: int, stop: int) -> "Shard":
        """Slices the tokens `start` to `stop - 1`, without a copy."""
        return self._replace(tokens=self.tokens[start:stop], first=self.first + start)

    def request(self, start: int, stop: int) -> None:
        """Requests tokens from storage, without waiting for them."""
        if self.mapping is not None:
            begin = self.offset + (self.first + start) * self.tokens.itemsize
            extra = begin % mmap.PAGESIZE
            size = (stop - start) * self.tokens.itemsize + extra
            self.mapping.madvise(mmap.MADV_WILLNEED, begin - extra, size)


class TokenStream:
    """Shards one after another; one or more, none of them empty, all of one dtype."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        first = self.shards[0]
        self.dtype = first.tokens.dtype
        for tokens, name, *_ in self.shards:
            if tokens.dtype != self.dtype:
                raise ConfigError(
                    f"{name} holds {tokens.dtype} tokens and {first.name} {self.dtype};"
                    " shards are one stream and have one dtype"
                )
        # Python's integers: positions go beyond 32 bits.
        self._ends = list(itertools.accumulate(len(s.tokens) for s in self.shards))
        self._copied = 0

    def __len__(self) -> int:
        return self._ends[-1]

    @functools.cached_property
    def array(self) -> np.ndarray:
        """All tokens as one array: the file's own mapping, or a copy of many files."""
        arrays = [shard.tokens for shard in self.shards]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def section(self, start: int, stop: int) -> "TokenStream":
        """Slices the tokens `start` to `stop - 1`, without a copy."""
        return TokenStream([x.section(a, b) for x, a, b in self._pieces(start, stop)])

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies windows [B, T] that begin at `starts`, int64 [B], natively."""
        rows = [list(self._pieces(s, s + length)) for s in starts.tolist()]
        # Before it waits for any: so storage works on many at once.
        for shard, first, last in itertools.chain.from_iterable(rows):
            shard.request(first, last)
        result = np.empty((len(rows), length), self.dtype.newbyteorder("="))
        for row, pieces in zip(result, rows, strict=True):
            filled = 0
            for shard, first, last in pieces:
                row[filled : filled + last - first] = shard.tokens[first:last]
                filled += last - first
        self._copied += len(rows)
        if self._copied >= RELEASE_EVERY:
            self._copied = 0
            for mapping in filter(None, (shard.mapping for shard in self.shards)):
                mapping.madvise(mmap.MADV_DONTNEED)  # The kernel still caches them.
        return result

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """Yields the shards that hold some tokens, each with begin and end."""
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            shard, end = self.shards[index], self._ends[index]
            begin = end - len(shard.tokens)
            yield shard, start - begin, min(stop, end) - begin
            start, index = end, index + 1

    def locate(self, position: int) -> str:
        """Names the file of one token, and the position in it: for errors."""
        shard, first, _ = next(self._pieces(position, position + 1))
        return f"{shard.name}, token {shard.first + first}"

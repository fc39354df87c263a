"""Reading of pretrained parameters: from files onto the devices."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np

from haiku_template.devices import DeviceManager, host_buffer
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.pretrained.rules import TRANSFORMS, Match, Rule, match
from haiku_template.pretrained.tensors import pieces, read_headers


def read(
    source: str | Path,
    skeleton: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    skip: Collection[str] = (),
    place: Callable[[str, np.ndarray], Any] | None = None,
) -> dict[str, jax.Array]:
    """Reads tensors into parameters: all that fit the skeleton, or none.

    All names, shapes and dtypes are checked before the first value is read. Parameters
    go one by one into a host buffer of their own, and to the devices; none of them
    shares the file's memory, so that a file may change later.

    Args:
      skeleton: parameters, or their shapes and dtypes; float16, bfloat16, float32 and
        float64 are converted into each other.
      skip: paths of parameters that are left out.
      place: puts a path's array on the devices; None replicates it.

    Returns:
      The parameters by path.

    Raises `ConfigError` if the files are missing, damaged or pickles; names, shapes
    or dtypes do not fit; or tied tensors differ.
    """
    shapes = {k: v for k, v in flatten(skeleton).items() if k not in skip}
    matches = match(read_headers(Path(source)), shapes, rules, skip)
    replicate = lambda path, array: devices.replicate(array)  # noqa: E731
    return load(matches, shapes, place or replicate)


def load(
    matches: dict[str, list[Match]],
    shapes: dict[str, Any],
    place: Callable[[str, np.ndarray], Any],
) -> dict[str, Any]:
    """Reads the tensors that `match` found into leaves of the wanted shapes.

    `place(path, array)` puts each on the devices before the next is read.
    """
    for first, *tied in matches.values():
        for other in tied:
            _check_tied(other, first)
    leaves = {}
    for path, (first, *_) in matches.items():
        # Waiting keeps no more than one parameter in host memory.
        leaves[path] = jax.block_until_ready(place(path, _read(first, shapes[path])))
    return leaves


def _read(tensor_match: Match, leaf: Any) -> np.ndarray:
    buffer = host_buffer(leaf.shape, leaf.dtype)
    view = TRANSFORMS[tensor_match.transform](buffer)
    for rows, values in pieces(tensor_match.tensor):
        view[rows] = values
    return buffer


def _check_tied(other: Match, first: Match) -> None:
    """Asserts that two tensors of one parameter hold the same bytes."""
    kinds = {(m.transform, m.tensor.dtype) for m in (other, first)}
    pairs = zip(pieces(other.tensor), pieces(first.tensor), strict=True)
    if len(kinds) > 1 or any(a.tobytes() != b.tobytes() for (_, a), (_, b) in pairs):
        raise ConfigError(
            f"{other.tensor} and {first.tensor} differ, and in this model both are "
            f"{other.path}: tied tensors must be equal"
        )

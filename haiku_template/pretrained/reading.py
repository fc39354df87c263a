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
) -> dict[str, jax.Array]:
    """Reads tensors into parameters: all that fit the skeleton, or none.

    All names, shapes and dtypes are checked before the first value is read. Parameters
    go one by one into a host buffer of their own, and to the devices; none of them
    shares the file's memory, so that a file may change later.

    Args:
      skeleton: parameters, or their shapes and dtypes; float16, bfloat16, float32 and
        float64 are converted into each other.
      skip: paths of parameters that are left out.

    Returns:
      The parameters by path, replicated.

    Raises:
      ConfigError: the files are missing, damaged or pickles; names, shapes or dtypes do
        not fit; or tied tensors differ.
    """
    shapes = {k: v for k, v in flatten(skeleton).items() if k not in skip}
    return load(match(read_headers(Path(source)), shapes, rules, skip), shapes, devices)


def load(
    matches: dict[str, list[Match]],
    shapes: dict[str, Any],
    devices: DeviceManager,
    store: Callable[[str, Any], Any] = lambda path, array: array,
) -> dict[str, Any]:
    """Reads the tensors that `match` found into leaves of the wanted shapes.

    `store(path, array)` makes of each, on the host, what goes to the devices.
    """
    for first, *tied in matches.values():
        for other in tied:
            _check_tied(other, first)
    leaves = {}
    for path, (first, *_) in matches.items():
        leaf = store(path, _read(first, shapes[path]))
        # Waiting keeps no more than one parameter in host memory.
        leaves[path] = jax.block_until_ready(devices.replicate(leaf))
    return leaves


def _read(tensor_match: Match, leaf: Any) -> np.ndarray:
    buffer = host_buffer(leaf.shape, leaf.dtype)
    view = TRANSFORMS[tensor_match.transform](buffer)
    for rows, values in pieces(tensor_match.tensor):
        view[rows] = values
    return buffer


def _check_tied(other: Match, first: Match) -> None:
    """Asserts that two tensors of one parameter hold the same bytes."""
    same = [(m.transform, m.tensor.dtype) for m in (other, first)]
    pairs = zip(pieces(other.tensor), pieces(first.tensor), strict=True)
    if same[0] != same[1] or any(
        a.tobytes() != b.tobytes() for (_, a), (_, b) in pairs
    ):
        raise ConfigError(
            f"{other.tensor} and {first.tensor} differ, and in this model both are "
            f"{other.path}: tied tensors must be equal"
        )

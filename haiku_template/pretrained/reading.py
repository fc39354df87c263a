"""Pretrained parameters: from files onto the devices, and into a model's skeleton."""

import fnmatch
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax

from haiku_template.devices import DeviceManager, host_buffer
from haiku_template.errors import ConfigError
from haiku_template.params import flatten, near, unflatten
from haiku_template.pretrained.rules import TRANSFORMS, Match, Rule, match
from haiku_template.pretrained.tensors import pieces, read_headers


def restore(
    source: str | Path,
    init: Callable[[], hk.Params],
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    fresh: Sequence[str] = (),
) -> hk.Params:
    """A model's parameters, read from files but for those that start fresh.

    Args:
      source: a Hugging Face folder, or its index, or one safetensors file.
      init: makes the parameters of the model. What is read is never made by it.
      rules: the rename table.
      devices: where the parameters are to live, whole on each.
      fresh: patterns (as in a shell) of the paths of parameters that `init` makes and
        no file gives, such as `bert/head/*`.

    Returns:
      What `init` returns: the same names, shapes and dtypes.

    Raises:
      ConfigError: see `read`; or a pattern of `fresh` that fits no parameter.
    """
    skeleton = devices.abstract(init)
    paths = list(flatten(skeleton))
    for pattern in fresh:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"fresh={pattern!r} fits no parameter of the model"
                f"{near(pattern, paths)}"
            )
    made = {path for pattern in fresh for path in fnmatch.filter(paths, pattern)}
    loaded = read(source, skeleton, rules, devices, skip=made)

    def some() -> dict[str, jax.Array]:
        return {path: x for path, x in flatten(init()).items() if path in made}

    # Compiled, so that what is not returned is not computed either.
    values = loaded | (devices.init(some) if made else {})
    return unflatten({path: values[path] for path in paths})


def read(
    source: str | Path,
    skeleton: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    skip: Collection[str] = (),
) -> dict[str, jax.Array]:
    """Reads tensors into parameters: all that fit the skeleton, or none.

    Every name, shape and dtype is checked before the first value is read. A parameter
    goes from a mapping of its file into one host buffer of its own shape and dtype, and
    from there to the devices, before the next one is looked at. The CPU takes the
    buffer over; it never holds the file's memory, so a file that changes later changes
    no parameter.

    Args:
      source: see `restore`.
      skeleton: shapes and dtypes of the parameters, {module: {name: ...}}; float16,
        bfloat16, float32 and float64 are converted into each other.
      rules: the rename table.
      devices: where the parameters are to live, whole on each.
      skip: paths of parameters that are left out.

    Returns:
      The parameters by path, but those of `skip`.

    Raises:
      ConfigError: the files are missing, damaged or pickles; names, shapes or
        dtypes do not fit; or tied tensors differ.
    """
    wanted = {k: v for k, v in flatten(skeleton).items() if k not in skip}
    tensors = read_headers(Path(source))
    matches, tied = match(tensors, wanted, rules, skip)
    by_path = {found.path: found for found in matches}
    for found in tied:
        _check_tied(found, by_path[found.path])
    return {found.path: _load(found, wanted[found.path], devices) for found in matches}


def _load(found: Match, leaf: Any, devices: DeviceManager) -> jax.Array:
    buffer = host_buffer(leaf.shape, leaf.dtype)
    view = TRANSFORMS[found.transform](buffer)
    for rows, values in pieces(found.tensor):
        view[rows] = values
    # Waiting bounds what is in host memory to one parameter.
    return jax.block_until_ready(devices.replicate(buffer))


def _check_tied(found: Match, first: Match) -> None:
    """Asserts that two tensors for one parameter hold the same bytes."""
    same = (found.transform, found.tensor.dtype) == (
        first.transform,
        first.tensor.dtype,
    )
    pairs = zip(pieces(found.tensor), pieces(first.tensor), strict=True)
    if not same or any(a.tobytes() != b.tobytes() for (_, a), (_, b) in pairs):
        raise ConfigError(
            f"{found.tensor} and {first.tensor} differ, and in this model both are "
            f"{found.path}: tied tensors must be equal"
        )

"""What trains and what is frozen: parameters by pattern, and how fast each learns.

A parameter's path is its module and its name: `gpt/block_0/attention/qkv/w`. Patterns
are as in a shell: `*` is anything, slashes too, `?` one character, `[ab]` one of them.
"""

import fnmatch
from collections.abc import Collection, Sequence
from typing import Any

import haiku as hk
import jax
import optax

from haiku_template.finetuning.errors import TuningError
from haiku_template.finetuning.pretrained import flatten, unflatten
from haiku_template.finetuning.rules import near

SHOWN = 20  # Names in a message.
Multipliers = Sequence[tuple[str, float]]


def select(what: str, patterns: Sequence[str], paths: Collection[str]) -> set[str]:
    """The paths that fit one of the patterns.

    Args:
      what: the setting that the patterns come from, for the message.
      patterns: each must fit something.
      paths: what there is.

    Raises:
      TuningError: a pattern fits nothing; names the nearest path.
    """
    selected = set()
    for pattern in patterns:
        fits = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not fits:
            some = sorted({"/".join(path.split("/")[-2:]) for path in paths})[:SHOWN]
            raise TuningError(
                f"{what}: the pattern {pattern!r} fits none of the {len(paths)} that "
                f"there are{near(pattern, paths)}; they end in {', '.join(some)}"
            )
        selected |= fits
    return selected


def partition(params: hk.Params, paths: Collection[str]) -> tuple[hk.Params, hk.Params]:
    """The parameters with these paths, and the others."""
    leaves = flatten(params)
    return (
        unflatten({path: leaf for path, leaf in leaves.items() if path in paths}),
        unflatten({path: leaf for path, leaf in leaves.items() if path not in paths}),
    )


def join(a: hk.Params, b: hk.Params) -> hk.Params:
    """What `partition` parted."""
    return unflatten(flatten(a) | flatten(b))


def scale_updates(multipliers: Multipliers) -> optax.GradientTransformation:
    """Multiplies updates by path; chained behind an optimizer, its learning rates.

    Decay with depth is such a sequence: `[(f"*/block_{i}/*", 0.8 ** (12 - i)) for i in
    range(12)]`.

    Args:
      multipliers: (pattern, factor); the first that fits counts, and what none fits is
        left as it is.
    """

    def factor(path: str) -> float:
        fits = (f for pattern, f in multipliers if fnmatch.fnmatchcase(path, pattern))
        return next(fits, 1.0)

    def scale(updates: Any, params: Any = None) -> Any:
        del params
        scaled = {path: factor(path) * x for path, x in flatten(updates).items()}
        return unflatten(scaled)

    return optax.stateless(scale)


def check_multipliers(multipliers: Multipliers, paths: Collection[str]) -> None:
    """Asserts that each multiplier is one, and fits a parameter that trains.

    Raises:
      TuningError: it does not.
    """
    for entry in multipliers:
        if len(entry) != 2 or not isinstance(entry[1], int | float) or entry[1] <= 0:
            raise TuningError(
                f"multipliers: {entry!r}; each is a pattern and a factor of more than "
                "0, such as ('*/embed/*', 0.1); what is not to train is left out of "
                "train"
            )
    select("multipliers", [pattern for pattern, _ in multipliers], paths)


def count(params: Any) -> tuple[int, int]:
    """How many numbers a tree holds, and in how many bytes."""
    leaves = jax.tree.leaves(params)
    sizes = [leaf.size for leaf in leaves]
    return sum(sizes), sum(
        size * leaf.dtype.itemsize for size, leaf in zip(sizes, leaves, strict=True)
    )

"""Rename rules, as data: from a tensor's name in a file to a parameter's path.

A parameter's path is its module and its name: `gpt/block_0/attention/qkv/w`.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_template.devices.checks import shaped
from haiku_template.errors import ConfigError, near
from haiku_template.models import Rule
from haiku_template.pretrained.tensors import FLOATS, Tensor

# Pairs of names that are compared for the nearest, in all, at up to a millisecond each.
GUESSES = 5000
# Views of a parameter with the axes of the file's tensor, to read into and to write.
# Why: docs/decisions/finetuning.md#rename-tables
TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "same": np.asarray,
    "transpose": np.transpose,
}
# Of files whose names are paths: any name, whatever is in it.
SAME_NAMES = Rule("*", "*")


class Match(NamedTuple):
    """A tensor, and the parameter that it becomes."""

    path: str
    tensor: Tensor
    transform: str


def find(rules: Sequence[Rule], name: str) -> tuple[Rule | None, str | None]:
    """Finds the first rule for a tensor, and its path; (None, None) without a rule."""
    for rule in rules:
        if rule == SAME_NAMES:
            return rule, name
        if fits := _expression(rule.pattern).fullmatch(name):
            return rule, rule.target and rule.target.format(*fits.groups())
    return None, None


def tensor_name(
    rules: Sequence[Rule], path: str, with_brackets: bool = True
) -> tuple[str | None, Rule | None]:
    """Names the tensor of a parameter, and its rule; (None, None) without one.

    `with_brackets` keeps the parts of names that may be missing.
    """
    for rule in rules:
        if rule == SAME_NAMES:
            return path, rule
        if fits := rule.target and _expression(rule.target).fullmatch(path):
            pattern = re.sub(r"\[(.*?)\]", r"\1" if with_brackets else "", rule.pattern)
            return pattern.format(*fits.groups()), rule
    return None, None


@functools.cache
def _expression(pattern: str) -> re.Pattern:
    symbols = {"{}": r"(\d+)", "*": ".*", "[": "(?:", "]": ")?"}
    pieces = re.split(r"(\{\}|[*\[\]])", pattern)
    return re.compile("".join(symbols.get(word) or re.escape(word) for word in pieces))


def match(
    tensors: dict[str, Tensor],
    skeleton: dict[str, Any],
    rules: Sequence[Rule],
    skip: Collection[str] = (),
    ignored: Collection[str] = (),
) -> dict[str, list[Match]]:
    """Matches tensors, by name, to parameters by path: shapes and dtypes.

    Names in `ignored` may be left over.

    Returns:
      The tensors of each parameter: one, and those tied to it, of the same bytes.

    Raises `ConfigError` if parameters outside of `skip` are missing in the files, the
    files hold others, or shapes or dtypes do not fit. The message lists every one.
    """
    matches: dict[str, list[Match]] = {}
    extra = []
    fits = {name: find(rules, name) for name in tensors}
    order = [*rules, None]  # Of tied tensors, that of the earliest rule comes first.
    for name in sorted(tensors, key=lambda name: order.index(fits[name][0])):
        rule, path = fits[name]
        if path in skeleton:
            tensor_match = Match(path, tensors[name], rule.transform)
            matches.setdefault(path, []).append(tensor_match)
        elif name not in ignored and (
            not rule or not (path is None or path in skip or rule.optional)
        ):
            extra.append(name)
    if faults := list(_faults(matches, extra, tensors, skeleton, rules)):
        count = Counter(fault.split()[0] for fault in faults)
        raise ConfigError(
            f"the files do not fit the model, and nothing was read: {count['missing']} "
            f"missing, {count['extra']} extra, {count['mismatch']} mismatched "
            "(in config.finetuning, rename maps names of the files to the model's, "
            "fresh lets what is missing start from the seed, and ignore leaves out "
            "what is extra; patterns are of paths, MODULE/NAME)\n  "
            + "\n  ".join(faults)
        )
    return matches


def _faults(
    matches: dict[str, list[Match]],
    extra: list[str],
    tensors: dict[str, Tensor],
    skeleton: dict[str, Any],
    rules: Sequence[Rule],
) -> Iterator[str]:
    names = {p: tensor_name(rules, p)[0] for p in skeleton if p not in matches}
    most = GUESSES // max(1, len(extra), len(names))
    for i, (path, name) in enumerate(names.items()):
        expected = f"{name} is not in the files" if name else "no rule leads to it"
        guess = near(name, extra) if name and i < most else ""
        yield f"missing  {path} {shaped(skeleton[path])}: {expected}{guess}"
    for i, name in enumerate(extra):
        guess = near(name, filter(None, names.values())) if i < most else ""
        path = f"{name}: " * (name != tensors[name].name)  # As patterns take it.
        yield f"extra    {path}{tensors[name]}{guess}"
    for path, tensor, transform in itertools.chain(*matches.values()):
        target = skeleton[path]
        shape = TRANSFORMS[transform](np.broadcast_to(False, target.shape)).shape
        is_float, requirement = jnp.issubdtype(target.dtype, jnp.floating), None
        if tensor.shape != shape:
            requirement = f"shape {list(shape)}"
            if tensor.shape[1:] == shape:  # As `pmap` has them.
                requirement += f", one of {tensor.shape[0]} (convert --unreplicate),"
        elif is_float and tensor.dtype not in FLOATS:
            requirement = f"one of {', '.join(FLOATS)}"
        elif not is_float and tensor.numpy_dtype != target.dtype:
            requirement = target.dtype
        if requirement:
            mismatch = f"{tensor} for {path} {shaped(target)}"
            yield f"mismatch {mismatch}: {requirement} is needed in the file"

"""Rename rules, as data: from a tensor's name in a file to a parameter's path.

A parameter's path is its module and its name: `gpt/block_0/attention/qkv/w`.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from haiku_template.errors import ConfigError
from haiku_template.models import Rule
from haiku_template.params import near
from haiku_template.pretrained.tensors import FLOATS, Tensor

GUESSES = 50  # Names for which the nearest is looked for, which takes milliseconds.


# Views of a parameter with the axes of the file's tensor, to read into and to write.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "same": lambda parameter: parameter,
    "transpose": lambda parameter: parameter.T,
}


class Match(NamedTuple):
    """A tensor, and the parameter that it becomes."""

    path: str
    tensor: Tensor
    transform: str


def find(rules: Sequence[Rule], name: str) -> tuple[Rule, str | None] | None:
    """Finds the first rule for a tensor, and its path; None without a rule."""
    for rule in rules:
        fits = _expression(rule.pattern).fullmatch(name)
        if fits:
            return rule, rule.target and rule.target.format(*fits.groups())
    return None


def tensor_name(
    rules: Sequence[Rule], path: str, with_brackets: bool = True
) -> tuple[str, Rule] | None:
    """Names the tensor of a parameter, and its rule; None without one.

    `with_brackets` keeps the parts of names that may be missing.
    """
    for rule in rules:
        fits = rule.target and _expression(rule.target).fullmatch(path)
        if fits:
            kept = r"\1" if with_brackets else ""
            pattern = re.sub(r"\[(.*?)\]", kept, rule.pattern)
            return pattern.format(*fits.groups()), rule
    return None


@functools.cache
def _expression(pattern: str) -> re.Pattern:
    """Translates a pattern into a regular expression."""
    parts = {"{}": r"(\d+)", "*": ".*", "[": "(?:", "]": ")?"}
    words = re.split(r"(\{\}|[*\[\]])", pattern)
    return re.compile("".join(parts.get(word) or re.escape(word) for word in words))


def match(
    tensors: dict[str, Tensor],
    skeleton: dict[str, Any],
    rules: Sequence[Rule],
    skip: Collection[str] = (),
) -> tuple[list[Match], list[Match]]:
    """Matches tensors to parameters.

    Args:
      tensors: of the files, by name.
      skeleton: shapes and dtypes of the parameters, by path.
      skip: paths of parameters that are not to be read.

    Returns:
      One match for each parameter; and those of tied tensors, which must hold the same
      bytes.

    Raises:
      ConfigError: parameters are missing in the files, the files hold others, or shapes
        or dtypes do not fit. The message lists every one.
    """
    matches: dict[str, Match] = {}
    tied, extra = [], []
    fits = {name: find(rules, name) for name in tensors}
    for name in sorted(tensors, key=lambda name: _rank(rules, fits[name])):
        rule, path = fits[name] or (None, name)
        if rule and path in matches:
            tied.append(Match(path, tensors[name], rule.transform))
        elif rule and path in skeleton:
            matches[path] = Match(path, tensors[name], rule.transform)
        elif not rule or not (path is None or path in skip or rule.optional):
            extra.append(name)
    missing = [path for path in skeleton if path not in matches]
    faults = [
        *_missing(missing, extra, skeleton, rules),
        *_extra(extra, tensors, missing, rules),
        *(fault for m in [*matches.values(), *tied] for fault in _unfit(m, skeleton)),
    ]
    if faults:
        mismatched = len(faults) - len(missing) - len(extra)
        raise ConfigError(
            f"the files do not fit the model, and nothing was read: {len(missing)} "
            f"missing, {len(extra)} extra, {mismatched} mismatched (parameters that no "
            "file holds can start fresh)\n  " + "\n  ".join(faults)
        )
    return list(matches.values()), tied


def _rank(rules: Sequence[Rule], fit: tuple[Rule, str | None] | None) -> int:
    """Position of a tensor's rule: of tied tensors the earliest gives the values."""
    return rules.index(fit[0]) if fit else len(rules)


def _missing(
    paths: list[str], extra: list[str], skeleton: dict[str, Any], rules: Sequence[Rule]
) -> Iterator[str]:
    for i, path in enumerate(paths):
        named = tensor_name(rules, path)
        expected = f"{named[0]} is not in the files" if named else "no rule leads to it"
        guess = near(named[0], extra) if named and i < GUESSES else ""
        yield f"missing  {path} {_words(skeleton[path])}: {expected}{guess}"


def _extra(
    names: list[str],
    tensors: dict[str, Tensor],
    missing: list[str],
    rules: Sequence[Rule],
) -> Iterator[str]:
    wanted = [named[0] for named in (tensor_name(rules, m) for m in missing) if named]
    for i, name in enumerate(names):
        guess = near(name, wanted) if i < GUESSES else ""
        yield f"extra    {tensors[name]}{guess}"


def _unfit(found: Match, skeleton: dict[str, Any]) -> Iterator[str]:
    """Yields misfits of a tensor's shape or dtype, in words."""
    path, tensor, transform = found
    target = skeleton[path]
    shape = TRANSFORMS[transform](np.broadcast_to(False, target.shape)).shape
    what = f"mismatch {tensor} for {path} {_words(target)}"
    if tensor.shape != shape:
        yield f"{what}: shape {list(shape)} is needed in the file"
    elif jnp.issubdtype(target.dtype, jnp.floating) and tensor.dtype not in FLOATS:
        yield f"{what}: one of {', '.join(FLOATS)} is needed in the file"
    elif not jnp.issubdtype(target.dtype, jnp.floating) and (
        tensor.numpy_dtype != target.dtype
    ):
        yield f"{what}: {target.dtype} is needed in the file"


def _words(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"

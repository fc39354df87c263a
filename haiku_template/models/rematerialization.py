"""Rematerialization of modules by name; the model's code stays as it is."""

import contextvars
import re
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any

import haiku as hk
import jax

from haiku_template.errors import ConfigError, counted, near, some
from haiku_template.params import matching, ordered

SHOWN = 20  # Names in a message.
NUMBER = re.compile(r"_\d+$")
_nested = contextvars.ContextVar("nested", default=False)


def remat(model: Any, patterns: Sequence[str]) -> Any:
    """Makes a transformed model compute modules again in its backward pass.

    What happens inside them is not kept until then: less memory, more work, the same
    numbers. Initialization and the names of parameters stay as they are.

    Args:
      model: from `hk.transform` or `hk.transform_with_state`.
      patterns: of the names of modules that are called, as in a shell: `*/block_*`;
        `*/` may stand for nothing. Of nested modules the outermost counts.

    `init` raises `ConfigError` if a pattern fits no module.
    """

    @wraps(model.init)
    def init(*args: Any, **kwargs: Any) -> Any:
        names: dict[str, type] = {}
        with hk.intercept_methods(_noting(names)):
            first = model.init(*args, **kwargs)
        for pattern in patterns:
            if not _fitting(pattern, names):
                outer = sorted(names, key=lambda name: name.count("/"))
                raise ConfigError(
                    f"config.model.remat: the pattern {pattern!r} fits none of the "
                    f"{counted(len(outer), 'modules')} that the model calls"
                    f"{near(pattern, outer)}; they are {some(outer, SHOWN)}"
                )
        return first

    def run(call: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        is_outermost = context.method_name == "__call__" and not _nested.get()
        if is_outermost and not hk.running_init():
            names = [context.module.module_name]
            if any(_fitting(pattern, names) for pattern in patterns):
                return _recomputed(call, args, kwargs)
        return call(*args, **kwargs)

    @wraps(model.apply)
    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            with hk.intercept_methods(run):
                return model.apply(*args, **kwargs)
        except jax.errors.UnexpectedTracerError as error:
            raise ConfigError(
                f"config.model.remat={tuple(patterns)}: a module computed twice left "
                "a result in an attribute (self.kept = ...) or a list, from where "
                "it was used; let it return that, or name other modules"
            ) from error

    return model._replace(init=init, apply=apply) if patterns else model


def repeated_blocks(init: Callable[[], Any]) -> list[tuple[str, ...]]:
    """Patterns of modules that a model repeats: the outermost, then those inside.

    Their names differ in numbers, and they hold others: of a single layer nearly all
    that the backward pass needs are its inputs, kept in any case. `init` is called.
    """
    names: dict[str, type] = {}
    with hk.intercept_methods(_noting(names)):
        init()
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name, kind in names.items():
        holds = any(other.startswith(f"{name}/") for other in names)
        if holds and not issubclass(kind, hk.BatchNorm):  # It holds two averages.
            segments = name.split("/")
            alike = tuple(NUMBER.sub("", segment) for segment in segments)
            groups.setdefault(alike, []).append(segments)
    repeated = {alike: group for alike, group in groups.items() if len(group) > 1}
    levels: dict[int, tuple[str, ...]] = {}
    for alike, group in repeated.items():
        level = sum(alike[: len(outer)] == outer for outer in repeated)
        pattern = "/".join(map(_segment, zip(*group, strict=True)))
        levels[level] = (*levels.get(level, ()), pattern)
    return [levels[level] for level in sorted(levels)]


def _segment(forms: tuple[str, ...]) -> str:
    """Pattern of a segment of several names, which differs in its number at most."""
    if len(set(forms)) == 1:
        return forms[0]
    numbered = all(NUMBER.search(form) for form in forms)
    return NUMBER.sub("", forms[0]) + ("_*" if numbered else "*")


def _noting(names: dict[str, type]) -> Callable[..., Any]:
    """Makes an interceptor that notes the modules that are called, by name."""

    def note(call: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        if context.method_name == "__call__":
            names[context.module.module_name] = type(context.module)
        return call(*args, **kwargs)

    return note


def _fitting(pattern: str, names: Collection[str]) -> set[str]:
    return matching(pattern, [*names, *(f"/{name}" for name in names)])


def _recomputed(call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Calls a module inside `hk.remat`, which gives arrays alone.

    Arguments are closed over, since JAX sorts the dictionaries of copies. Why:
    docs/decisions/models.md#rematerialization
    """
    traced: list[Any] = []

    def run() -> list[jax.Array]:
        token = _nested.set(True)
        try:
            result = call(*args, **kwargs)
        finally:
            _nested.reset(token)
        leaves, treedef = jax.tree.flatten(result)
        traced[:] = result, leaves, treedef
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    arrays = iter(hk.remat(run)())
    result, leaves, treedef = traced
    leaves = [next(arrays) if isinstance(x, jax.Array) else x for x in leaves]
    return ordered(jax.tree.unflatten(treedef, leaves), result)

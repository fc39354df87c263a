"""Values of one JAX trace that are used in another, and who left them there."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from haiku_template.devices.errors import PlacementError

REMEDY = (
    "jax.jit or jax.lax.scan around Haiku modules inside hk.transform leaves tracers; "
    "use hk.scan or hk.remat, or jit outside the transform"
)
PLACE = re.compile(r"(\S+\.py:\d+)(?::\d+)? (?:\(|traced for)")


@contextlib.contextmanager
def leaks_named(make: Callable[[], Any] | None = None) -> Iterator[None]:
    """Turns JAX's page about a leaked tracer into a sentence.

    Args:
      make: the function that is traced inside, to find out which of its results are
        tracers of traces that have ended: `hk.transform`'s init returns such
        parameters in silence.

    Raises:
      PlacementError: names these results, and where the value was made.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise leak_error(error, make) from error


def leak_error(
    error: jax.errors.UnexpectedTracerError, make: Callable[[], Any] | None = None
) -> PlacementError:
    """What `leaks_named` raises for JAX's error."""
    places = [p for p in PLACE.findall(str(error)) if "site-packages" not in p]
    kind = re.search(r"with type (\S+)", str(error))
    leaves = _leaked_leaves(make) if make is not None else []
    return PlacementError(
        f"{', '.join(leaves[:4]) or 'a value'}{' and others' * (len(leaves) > 4)} "
        f"of type {kind[1] if kind else 'unknown'} made at "
        f"{places[-1] if places else 'an unknown place'} is a tracer that leaks "
        f"out of its trace: {REMEDY}, and keep no array of a model in a list, an "
        "attribute or a global"
    )


def _leaked_leaves(make: Callable[[], Any]) -> list[str]:
    """The results that stay tracers where nothing is traced."""
    try:
        tree = make()
    except Exception:  # It fails for the same reason before it has results.
        return []
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.core.Tracer)
    ]

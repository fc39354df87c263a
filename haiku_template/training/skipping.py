"""Steps whose numbers are not finite: they leave the state as it was."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Literal

from haiku_template.training.state import SKIPPED, TrainState
from haiku_template.training.step import Scalars, Update

REDUCED = ("loss", "grad_norm")  # Scalars that are the same on all devices.
GOES_ON = ("step", "loss_scale")  # Fields of the state, in each step.


def skipping(update: Update) -> Update:
    """Wraps `update(state, results)`: a step that is not finite leaves the state alone.

    That is one whose loss, gradient norm or new network state has a NaN or infinity;
    leaves of network state that are infinite may stay so. `step` counts on, and a loss
    scale is adjusted. Adds the scalar `SKIPPED`.
    """

    def update_or_skip(state: TrainState, results: Any) -> tuple[TrainState, Scalars]:
        # Why: docs/decisions/training.md#untouched-state
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(state, results)
        program, structure = closed.jaxpr, jax.tree.structure(shapes)
        arrays = [*closed.consts, *jax.tree.leaves((state, results))]
        inputs = map(id, [*program.constvars, *program.invars])
        values = dict(zip(inputs, arrays, strict=True))
        values |= {id(x): x.val for x in program.outvars if isinstance(x, Literal)}
        new, scalars = structure.unflatten(map(id, program.outvars))
        tested = new.net_state, [scalars[name] for name in REDUCED if name in scalars]
        if not values.keys() >= {*jax.tree.leaves(tested)}:
            _evaluate(program, values)  # An update of a user's may make them.
        finite = _is_finite(state.net_state, *jax.tree.map(values.get, tested))
        pairs = zip(_guarded(new), _guarded(state), strict=True)
        old = {x: leaf for x, leaf in pairs if x not in values}
        _evaluate(program, values, old, finite)

        def select(x: int, leaf: jax.Array) -> jax.Array:
            is_selected = old.get(x) is leaf
            return values[x] if is_selected else jnp.where(finite, values[x], leaf)

        scalars = jax.tree.map(values.get, scalars)
        scalars[SKIPPED] = (~finite).astype(scalars["loss"].dtype)
        kept = jax.tree.map(select, new, state)
        goes_on = {k: jax.tree.map(values.get, new._asdict()[k]) for k in GOES_ON}
        return kept._replace(**goes_on), scalars

    return update_or_skip


def _guarded(state: TrainState) -> list[Any]:
    """Leaves that a skipped step leaves alone."""
    return jax.tree.leaves(state._replace(**dict.fromkeys(GOES_ON)))


def _is_finite(old: Any, new: Any, scalars: list[jax.Array]) -> jax.Array:
    """Tests scalars, and network state beside the old one: bool []."""
    pairs: dict[Any, list[Any]] = {}
    for pair in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jnp.issubdtype(pair[1].dtype, jnp.inexact):
            pairs.setdefault((pair[1].shape, pair[1].dtype), []).append(pair)
    finite = jnp.stack([jnp.isfinite(x) for x in scalars]).all()
    for leaves in pairs.values():  # Of one shape at once: fewer kernels.
        stacks = map(jnp.stack, zip(*leaves, strict=True))
        before, after = (x.reshape(len(leaves), -1) for x in stacks)
        may_be_infinite = jnp.isinf(before).any(axis=1, keepdims=True)
        finite &= (jnp.isfinite(after) | (jnp.isinf(after) & may_be_infinite)).all()
    return finite


def _evaluate(
    program: Jaxpr,
    values: dict[int, Any],
    old: dict[int, jax.Array] | None = None,
    finite: Any = True,
) -> None:
    """Adds the values of a program's variables by id, or the `old` ones of a leaf.

    Selected where they are made, so that no leaf is needed in two versions at once.
    """
    old = old or {}
    for equation in program.eqns:
        inputs = [x for x in equation.invars if not isinstance(x, Literal)]
        inputs = list({id(x): x for x in inputs}.values())
        one = program.replace(
            constvars=[], invars=inputs, eqns=[equation], outvars=equation.outvars
        )
        results = eval_jaxpr(one, (), *(values[id(x)] for x in inputs))
        for x, result in zip(map(id, equation.outvars), results, strict=True):
            values[x] = jnp.where(finite, result, old[x]) if x in old else result

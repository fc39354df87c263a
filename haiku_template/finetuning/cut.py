"""Cut through a model: features of an example that do not change, and what is left.

What is left is found in the traced program: all that outputs depend on once features
are given. Other parameters and inputs are absent. Shapes: B examples, W words of each.
"""

import fnmatch
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_template.devices.step import with_axis
from haiku_template.errors import ConfigError, near
from haiku_template.models import plain_outputs
from haiku_template.params import flatten, ordered, unflatten

ROWS = 509  # B of what is traced: no other axis has this length.
SHOWN = 20  # Names in a message.
KINDS = (jnp.bool_, jnp.integer, jnp.floating)  # Of what is stored.


class Model(NamedTuple):
    """A model, and its modules at which it is cut."""

    # `apply(params, net_state, rng, inputs, is_training)`, and shapes of its arguments:
    # params in compute precision, inputs [B, ...] as it gets them.
    apply: Callable[..., Any]
    params: hk.Params
    net_state: hk.State
    inputs: Any
    # Of modules: features are the arguments of those that train, else the results.
    pattern: str
    trained: frozenset[str]  # Paths of parameters that train, or have adapters.
    axis_name: str | None

    def run(
        self, args: tuple, mask: Sequence[bool] = (), features: Sequence[Any] = ()
    ) -> tuple[Any, list[Any], list[bool], list[str]]:
        """Applies the model, with features if they are given.

        Returns the result, the features, the mask and the names of all modules. `mask`
        tells which of the leaves at the cut are features, one call after another; by
        default those with `ROWS`. Modules inside of those of the cut do not count.
        """
        inside, names, found, flags = [], [], [], []
        given, known = iter(features), iter(mask)

        def take(tree: Any) -> Any:
            leaves, treedef = jax.tree.flatten(tree)
            own = [
                next(known) if mask else jnp.shape(leaf)[:1] == (ROWS,)
                for leaf in leaves
            ]
            flags.extend(own)
            found.extend(_selected(leaves, own))
            if not features:
                return tree
            return ordered(treedef.unflatten(_replaced(leaves, own, given)), tree)

        def look(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return call(*args, **kwargs)
            names.append(name := context.module.module_name)
            if inside or not fnmatch.fnmatchcase(name, self.pattern):
                return call(*args, **kwargs)
            inside.append(name)
            try:
                if any(path.startswith(f"{name}/") for path in self.trained):
                    args, kwargs = take((args, kwargs))
                    return call(*args, **kwargs)
                return take(call(*args, **kwargs))
            finally:
                inside.pop()

        with hk.intercept_methods(look):
            return self.apply(*args), found, flags, names

    def trace(self, function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Traces a function of shapes: its program, and shapes of its results."""
        function = with_axis(function, self.axis_name)
        return jax.make_jaxpr(function, return_shape=True)(*args)


class Cut(NamedTuple):
    """A model in two parts, made by `find`."""

    model: Model
    mask: tuple[bool, ...]  # Of `Model.run`.
    kept: tuple[bool, ...]  # Leaves of the inputs that are still needed.
    absent: frozenset[str]  # Parameters that are not, by path.
    stale: tuple[bool, ...]  # Leaves of the network state that stay as they are.
    leaves: tuple[Any, ...]  # Shapes of features and kept inputs, [B, ...].
    changes: bool  # Training computes other features, as with dropout.

    def compute(self, *args: Any) -> jax.Array:
        """Computes the features of `apply`'s arguments, and keeps inputs: [B, W]."""
        found = self.model.run(args, self.mask)[1]
        found += _selected(jax.tree.leaves(args[3]), self.kept)
        return jnp.concatenate([_words(x, self.dtype) for x in found], axis=1)

    def left(
        self, params: Any, net_state: Any, rng: Any, words: jax.Array, training: bool
    ) -> tuple[Any, hk.State]:
        """Applies what is left of the model; `absent` parameters may be missing."""
        given = self.arrays(words)
        blank = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        shapes = flatten(self.model.params)
        whole = blank({path: shapes[path] for path in self.absent}) | flatten(params)
        inputs, treedef = jax.tree.flatten(self.model.inputs)
        inputs = blank([x.update(shape=(len(words), *x.shape[1:])) for x in inputs])
        count = len(given) - sum(self.kept)
        inputs = treedef.unflatten(_replaced(inputs, self.kept, iter(given[count:])))
        args = unflatten(whole), net_state, rng, inputs, training
        outputs, new = self.model.run(args, self.mask, given[:count])[0]
        olds, treedef = jax.tree.flatten(net_state)
        olds = iter(_selected(olds, self.stale))
        return outputs, treedef.unflatten(
            _replaced(jax.tree.leaves(new), self.stale, olds)
        )

    def arrays(self, words: jax.Array) -> list[jax.Array]:
        """Inverse of `compute`: features and kept inputs, [B, ...]."""
        ends = itertools.accumulate(_size(leaf, self.dtype) for leaf in self.leaves)
        parts = zip(jnp.split(words, [*ends][:-1], axis=1), self.leaves, strict=True)
        return [_array(part, leaf) for part, leaf in parts]

    @property
    def dtype(self) -> Any:
        """Dtype of a word: unsigned, with the bytes of the smallest of the numbers."""
        return jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in self.leaves)}")

    @property
    def width(self) -> int:
        """Number of words of an example, W."""
        return sum(_size(leaf, self.dtype) for leaf in self.leaves)


def find(model: Model) -> Cut:
    """Finds what a model computes up to its cut, and what is left of it.

    Raises:
      ConfigError: no such module is called, or inside of a transformed function; the
        features depend on what trains, are random, complex, or made by a callback; or
        nothing is absent.
    """
    inputs = jax.tree.map(lambda x: x.update(shape=(ROWS, *x.shape[1:])), model.inputs)
    model = model._replace(inputs=inputs)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    args = model.params, model.net_state, rng, inputs
    leaves, treedef = jax.tree.flatten(args)
    params, states, key, inputs = treedef.unflatten(range(len(leaves)))
    paths, states, inputs = flatten(params), *map(jax.tree.leaves, (states, inputs))
    mask, features, program = _trace_features(model, args, False)
    used = _uses(program, range(len(features)))
    what = f"config.finetuning.features={model.pattern!r}"
    learned = sorted(path for path in model.trained if paths.get(path) in used)
    if learned or key in used:
        reason = f"depend on {learned[0]}, which trains" if learned else "are random"
        raise ConfigError(f"{what}: its features {reason}; they must not change")
    other, _, trained = _trace_features(model, args, True)
    if other != mask:
        raise ConfigError(f"{what}: training calls these modules otherwise")
    evaluated, count = _trace_left(model, (*args, features), mask, False)
    whole, _ = _trace_left(model, (*args, features), mask, True)
    needed = _uses(evaluated, range(count)) | _uses(whole, range(count))
    absent = {k for k, place in paths.items() if place not in needed} - model.trained
    if not absent:
        raise ConfigError(
            f"{what} leaves all of the model to be computed in each step: its outputs "
            "depend on all parameters and not on these modules alone"
        )
    missing = {paths[path] for path in absent} | {*inputs} - needed
    stale = [  # So does what features are made of.
        place in used or bool(missing & _uses(whole, [count + i]))
        for i, place in enumerate(states)
    ]
    kept = tuple(place in needed for place in inputs)
    features += _selected(jax.tree.leaves(model.inputs), kept)
    for x in features:
        if not any(jnp.issubdtype(x.dtype, kind) for kind in KINDS):
            raise ConfigError(f"{what}: features of {x.dtype} are not real numbers")
    facts = kept, frozenset(absent), tuple(stale), tuple(features)
    moves = any(
        place in used
        and whole.jaxpr.outvars[count + i] is not whole.jaxpr.invars[place]
        for i, place in enumerate(states)
    )
    return Cut(model, tuple(mask), *facts, moves or digest(trained) != digest(program))


def _trace_features(
    model: Model, args: tuple, training: bool
) -> tuple[list[bool], list[Any], ClosedJaxpr]:
    """Traces the features: the mask, their shapes, and the program."""
    mask, names = [], []

    def features(*args: Any) -> list[Any]:
        _, found, *others = model.run((*args, training))
        mask[:], names[:] = others
        return found

    program, shapes = model.trace(features, *args)
    what = f"config.finetuning.features={model.pattern!r}"
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ConfigError(
            f"{what} is called inside of jax.checkpoint, as remat does; name a module "
            "around that, or leave remat out"
        )
    if not shapes:
        some = ", ".join([*dict.fromkeys(reversed(names))][:SHOWN])
        raise ConfigError(
            f"{what} fits no module that is called with arrays of examples, as none is "
            f"inside of jax.vmap or scan{near(model.pattern, names)}; called are, the "
            f"last one first, {some}"
        )
    return mask, shapes, program


def _trace_left(
    model: Model, args: tuple, mask: list[bool], training: bool
) -> tuple[ClosedJaxpr, int]:
    """Traces what is left: its program, and the number of its outputs."""

    def left(*args: Any) -> tuple[Any, Any]:
        outputs, new = model.run((*args[:-1], training), mask, args[-1])[0]
        return plain_outputs(outputs), new

    program, (outputs, _) = model.trace(left, *args)
    return program, len(jax.tree.leaves(outputs))


def _uses(program: ClosedJaxpr, outputs: Collection[int]) -> set[int]:
    """Numbers of the arguments that some outputs depend on, by their numbers."""
    wanted = [place in outputs for place in range(len(program.jaxpr.outvars))]
    used = dce_jaxpr(program.jaxpr, wanted)[1]
    return {place for place, use in enumerate(used) if use}


def digest(program: ClosedJaxpr) -> str:
    """SHA-256 of all that the outputs depend on, constants among it.

    Raises `ConfigError` if that calls Python, of whose code no program tells.
    """
    jaxpr = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))[0]
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in jaxpr.invars]
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr, program.consts))
    text = jax.jit(function).lower(*shapes).as_text()
    if "xla_ffi_python" in text:
        raise ConfigError(
            "config.finetuning.features: the trunk calls Python (jax.pure_callback, "
            "jax.debug.print), and features would not change with that code; name "
            "modules before that, or leave it out"
        )
    return hashlib.sha256(text.encode()).hexdigest()


def _selected(leaves: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, selected in zip(leaves, mask, strict=True) if selected]


def _replaced(leaves: Sequence, mask: Sequence[bool], others: Iterator) -> list[Any]:
    pairs = zip(leaves, mask, strict=True)
    return [next(others) if selected else leaf for leaf, selected in pairs]


def _size(leaf: Any, dtype: Any) -> int:
    return math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // dtype.itemsize


def _words(x: jax.Array, dtype: Any) -> jax.Array:
    """Bits of an array as words: [B, W]."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    return jax.lax.bitcast_convert_type(x, dtype).reshape(len(x), -1)


def _array(words: jax.Array, leaf: Any) -> jax.Array:
    """Inverse of `_words`, for an array of this dtype and shape, but for its B."""
    if leaf.dtype == bool:
        return words.reshape(-1, *leaf.shape[1:]).astype(bool)
    many = leaf.dtype.itemsize // words.dtype.itemsize
    shape = (*leaf.shape[1:], many) if many > 1 else leaf.shape[1:]
    return jax.lax.bitcast_convert_type(words.reshape(-1, *shape), leaf.dtype)

"""Cut through a model: features of an example that do not change, and what is left.

What is left is found in the traced program: all that outputs depend on once features
are given. Other parameters and inputs are absent. Shapes: B examples, W words of each.
"""

import fnmatch
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_template.devices.step import with_axis
from haiku_template.errors import ConfigError, near
from haiku_template.models import plain_outputs
from haiku_template.params import flatten, unflatten

ROWS = 509  # B of what is traced: no other axis has this length.


class Model(NamedTuple):
    """A model, and its modules at which it is cut."""

    # `apply(params, net_state, rng, inputs, is_training)`, and shapes of its arguments:
    # params in compute precision, inputs as it gets them.
    apply: Callable[..., Any]
    params: hk.Params
    net_state: hk.State
    inputs: Any  # [B, ...]
    # Of modules: features are the arguments of those that train, else the results.
    pattern: str
    trained: frozenset[str]  # Paths of parameters that train, or have adapters.
    axis_name: str | None

    def run(self, take: Callable[[Any], Any], *args: Any) -> tuple[Any, list[str]]:
        """Applies the model; `take` maps a tree at each call of a module of the cut.

        Modules inside of these do not count. Returns the names of all, too.
        """
        inside, names = [], []

        def look(call: Any, given: tuple, kwargs: dict, context: Any) -> Any:
            if context.method_name != "__call__":
                return call(*given, **kwargs)
            names.append(name := context.module.module_name)
            if inside or not fnmatch.fnmatchcase(name, self.pattern):
                return call(*given, **kwargs)
            inside.append(name)
            try:
                if any(path.startswith(f"{name}/") for path in self.trained):
                    given, kwargs = take((given, kwargs))
                    return call(*given, **kwargs)
                return take(call(*given, **kwargs))
            finally:
                inside.pop()

        with hk.intercept_methods(look):
            return self.apply(*args), names


class Cut(NamedTuple):
    """A model in two parts, made by `find`."""

    model: Model
    features: tuple[tuple[bool, ...], ...]  # Leaves of each call that are of examples.
    kept: tuple[bool, ...]  # Leaves of the inputs that are still needed.
    absent: frozenset[str]  # Parameters that are not, by path.
    stale: tuple[bool, ...]  # Leaves of the network state that stay as they are.
    leaves: tuple[Any, ...]  # Shapes of features and kept inputs, [B, ...].
    program: str  # SHA-256 of what computes the features.
    changes: bool  # Training computes other features, as with dropout.

    def compute(self, *args: Any) -> jax.Array:
        """Computes the features of `apply`'s arguments, and keeps inputs: [B, W]."""
        found, inputs = [], jax.tree.leaves(args[3])

        def take(tree: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            found.extend(_selected(leaves, self.features[len(trees)]))
            trees.append(tree)
            return tree

        trees: list[Any] = []
        self.model.run(take, *args)
        found += _selected(inputs, self.kept)
        return jnp.concatenate([_words(x, self.dtype) for x in found], axis=1)

    def left(
        self, params: Any, net_state: Any, rng: Any, words: jax.Array, training: bool
    ) -> tuple[Any, hk.State]:
        """Applies what is left of the model; `absent` parameters may be missing."""
        model, given, start = self.model, [], 0
        for leaf in self.leaves:
            stop = start + _size(leaf, self.dtype)
            given.append(_array(words[:, start:stop], leaf))
            start = stop
        shapes = flatten(model.params)
        zeros = {k: jnp.zeros(shapes[k].shape, shapes[k].dtype) for k in self.absent}
        whole, inputs = (
            unflatten(zeros | flatten(params)),
            jax.tree.leaves(model.inputs),
        )
        blank = [jnp.zeros((len(words), *x.shape[1:]), x.dtype) for x in inputs]
        features = given[: len(given) - sum(self.kept)]
        blank = _replaced(blank, self.kept, iter(given[len(features) :]))
        inputs = jax.tree.unflatten(jax.tree.structure(model.inputs), blank)
        args = whole, net_state, rng, inputs, training
        outputs, new = _given(model, self.features, features, *args)
        olds, treedef = jax.tree.flatten(net_state)
        news = _replaced(jax.tree.leaves(new), self.stale, _selected(olds, self.stale))
        return outputs, treedef.unflatten(news)

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
        features depend on what trains, or are random; or nothing is absent.
    """
    inputs = jax.tree.map(lambda x: _rows(x, ROWS), model.inputs)
    model = model._replace(inputs=inputs)
    rng = jax.eval_shape(lambda: jax.random.key(0))
    args = model.params, model.net_state, rng, inputs
    count = len(jax.tree.leaves(args))
    params, _, key, inputs = jax.tree.unflatten(jax.tree.structure(args), range(count))
    paths, inputs = flatten(params), jax.tree.leaves(inputs)
    programs = {}
    for training in (True, False):
        masks, leaves, program = _trace_features(model, args, training)
        programs[training] = _digest(program)
    used = _uses(program, [True] * len(leaves))
    learned = sorted(path for path in model.trained if paths.get(path) in used)
    what = f"config.finetuning.features={model.pattern!r}"
    if learned or key in used:
        reason = f"depend on {learned[0]}, which trains" if learned else "are random"
        raise ConfigError(f"{what}: its features {reason}; they must not change")
    needed, outs = set(), ()
    for training in (False, True):
        program, outs = _trace_left(model, masks, leaves, args, training)
        of_outputs = [path == 0 for path in outs]
        needed |= _uses(program, of_outputs)
    absent = {k for k, place in paths.items() if place not in needed} - model.trained
    if not absent:
        raise ConfigError(
            f"{what} leaves all of the model to be computed in each step: its outputs "
            "depend on all parameters and not on these modules alone"
        )
    missing = {paths[path] for path in absent} | {*inputs} - needed
    stale = [
        bool(missing & _uses(program, [i == place for i in range(len(outs))]))
        for place, which in enumerate(outs)
        if which == 1
    ]
    kept = tuple(place in needed for place in inputs)
    leaves += _selected(jax.tree.leaves(model.inputs), kept)
    changes = programs[True] != programs[False]
    facts = kept, frozenset(absent), tuple(stale), tuple(leaves), programs[False]
    return Cut(model, masks, *facts, changes)


def _trace_features(
    model: Model, args: tuple, training: bool
) -> tuple[tuple[tuple[bool, ...], ...], list[Any], ClosedJaxpr]:
    """Traces the features: leaves of each call that are, shapes, and the program."""
    masks, names = [], []

    def features(*args: Any) -> list[Any]:
        found = []

        def take(tree: Any) -> Any:
            leaves = jax.tree.leaves(tree)
            masks.append(tuple(jnp.shape(x)[:1] == (ROWS,) for x in leaves))
            found.extend(_selected(leaves, masks[-1]))
            return tree

        names.extend(model.run(take, *args, training)[1])
        return found

    program, shapes = _trace(features, model.axis_name, args)
    what = f"config.finetuning.features={model.pattern!r}"
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        raise ConfigError(
            f"{what} is called inside of jax.checkpoint, as remat does; name a module "
            "around that, or leave remat out"
        )
    if not shapes:
        some = ", ".join(dict.fromkeys(reversed(names)))
        raise ConfigError(
            f"{what} fits no module that is called with arrays of examples, as none is "
            f"inside of jax.vmap or scan{near(model.pattern, names)}; called are, the "
            f"last one first, {some}"
        )
    return tuple(masks), shapes, program


def _trace_left(
    model: Model, masks: tuple, leaves: list[Any], args: tuple, training: bool
) -> tuple[ClosedJaxpr, list[int]]:
    """Traces what is left: its program, and 0 for each output, 1 for network state."""

    def left(*given: Any) -> tuple[Any, Any]:
        outputs, new = _given(model, masks, given[-1], *given[:-1], training)
        return plain_outputs(outputs), new

    program, (outputs, new) = _trace(left, model.axis_name, (*args, leaves))
    return program, [0] * len(jax.tree.leaves(outputs)) + [1] * len(
        jax.tree.leaves(new)
    )


def _trace(function: Callable, axis_name: str | None, args: tuple) -> tuple[Any, Any]:
    return jax.make_jaxpr(with_axis(function, axis_name), return_shape=True)(*args)


def _given(model: Model, masks: Sequence, features: Sequence, *args: Any) -> Any:
    """Applies a model in which features are given."""
    each, features = iter(masks), iter(features)

    def take(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(_replaced(leaves, next(each), features))

    return model.run(take, *args)[0]


def _uses(program: ClosedJaxpr, outputs: Sequence[bool]) -> set[int]:
    """Numbers of the arguments that these outputs depend on."""
    used = dce_jaxpr(program.jaxpr, list(outputs))[1]
    return {place for place, use in enumerate(used) if use}


def _digest(program: ClosedJaxpr) -> str:
    """SHA-256 of all that the outputs depend on, constants among it."""
    jaxpr = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))[0]
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in jaxpr.invars]
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr, program.consts))
    text = jax.jit(function).lower(*shapes).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def _selected(leaves: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, selected in zip(leaves, mask, strict=True) if selected]


def _replaced(leaves: Sequence, mask: Sequence[bool], others: Iterable) -> list[Any]:
    pairs, others = zip(leaves, mask, strict=True), iter(others)
    return [next(others) if selected else leaf for leaf, selected in pairs]


def _rows(leaf: Any, rows: int) -> Any:
    return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)


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

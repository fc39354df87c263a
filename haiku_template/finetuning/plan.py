"""Fine-tuning plan: trainable parameters, frozen parameters, adapters.

Trainable parameters are float32 and have gradients, optimizer state and checkpoints.
Frozen ones are replicated on every device, in a dtype of their own. Patterns are of
paths (`gpt/block_0/attention/qkv/w`), as in a shell: `*` is anything, slashes too, `?`
one character, `[ab]` one of them.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template import stored
from haiku_template.config import check_some
from haiku_template.errors import ConfigError, counted, near
from haiku_template.finetuning import lora as loras
from haiku_template.finetuning import quantized
from haiku_template.finetuning.lora import KINDS, MATRIX, A, B, Lora
from haiku_template.params import flatten, matching, unflatten
from haiku_template.pretrained import MARK

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", *quantized.FORMS)
EXACT = "bfloat16"  # Of those beside quantized ones.
# Why: docs/decisions/finetuning.md#unquantized
UNQUANTIZED = ("*embed*", "*/b", "*_b", "*bias*", "*scale", "*offset")
PATTERNS = ("train", "fresh", "unquantized", "ignore", "lora.patterns")
SHOWN = 20  # Names in a message.
Multipliers = Sequence[tuple[str, float]]
Axes = Mapping[str, str]  # By path.


class Finetuning(NamedTuple):
    """Fine-tuning, as patterns of parameters; by default all train."""

    train: tuple[str, ...] = ()  # Patterns; () is all, or with `lora` none.
    lora: Lora | None = None  # Adapters of frozen parameters.
    fresh: tuple[str, ...] = ()  # Start from the seed although others are read.
    base_dtype: str = "float32"  # Of frozen parameters; or bfloat16, int8, nf4.
    unquantized: tuple[str, ...] = UNQUANTIZED  # Patterns of those beside, bfloat16.
    multipliers: Multipliers = ()  # Of the learning rate: (pattern, factor) each.
    adapters: str | None = None  # A file or folder of adapters to start from.
    ignore: tuple[str, ...] = ()  # Names that may be left over in what is read.
    rename: tuple[tuple[str, str], ...] = ()  # Its names, and the model's.


def make_finetuning(init_from: str | None, lora: Any, **keys: Any) -> Finetuning:
    """Makes `config.finetuning`, whose keys these are, after `config.init_from`.

    Raises `ConfigError` if it names fresh parameters, or names in files, and nothing is
    read; or adapters without a rank.
    """
    for key in ("fresh", "ignore", "rename"):
        if keys[key] and init_from is None:
            raise ConfigError(
                f"config.finetuning.{key} needs --config.init_from (a workdir, a "
                "Hugging Face folder or a safetensors file): it says what "
                + ("is not read from it" if key == "fresh" else "its names may be")
            )
    if lora["rank"] is not None:
        return Finetuning(lora=Lora(**lora), **keys)
    for key, default in Lora._field_defaults.items():
        if lora[key] not in (default, ()):
            raise ConfigError(
                f"config.finetuning.lora.{key}={lora[key]} is of adapters, which "
                "config.finetuning.lora.rank=None leaves out; possible is a rank, as "
                f"8, or {() if isinstance(default, tuple) else default} here"
            )
    return Finetuning(**keys)


class Plan(NamedTuple):  # Why: docs/decisions/finetuning.md#frozen
    """Split of one model's parameters by path, made by `make_plan`.

    The default is that of a model whose parameters all train.
    """

    trained: frozenset[str] = frozenset()  # Themselves, not by an adapter.
    adapted: frozenset[str] = frozenset()  # Frozen, with an adapter.
    frozen: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()  # Are not read.
    lora: Lora = Lora(rank=0)  # With `axes` by path.
    dtype: str = "float32"  # Of frozen floating-point parameters, or their form.
    unquantized: frozenset[str] = frozenset()  # Of these the ones that have no form.

    def split(self, params: hk.Params) -> tuple[hk.Params, hk.Params]:
        """Splits all parameters: trainable ones, and frozen ones in their dtype."""
        trained, frozen = hk.data_structures.partition(
            lambda module, name, _: f"{module}/{name}" in self.trained, params
        )
        return trained, hk.data_structures.map(
            lambda module, name, x: self.store(f"{module}/{name}", x), frozen
        )

    def store(self, path: str, array: Any) -> Any:
        """Makes a frozen parameter as it is stored, of an array of NumPy's or JAX's."""
        if not _is_float(array):
            return array
        if self.dtype not in quantized.FORMS:
            return array.astype(self.dtype, copy=False)
        if path in self.unquantized:
            return array.astype(EXACT, copy=False)
        return quantized.FORMS[self.dtype].store(array)

    def init_params(self, params: hk.Params, rng: jax.Array) -> hk.Params:
        """Selects the trainable parameters before step 0, and makes the adapters."""
        shapes = {k: x.shape for k, x in flatten(params).items() if k in self.adapted}
        adapters = unflatten(loras.init_adapters(self.lora, shapes, rng))
        return hk.data_structures.merge(self.split(params)[0], adapters)

    def combine(
        self,
        params: hk.Params,
        frozen: hk.Params,
        dtype: Any,
        rng: jax.Array | None = None,
    ) -> hk.Params:
        """Merges trainable and frozen parameters, as `stored.py` has their forms.

        Adapters are multiplied in a dtype; `rng` is of their dropout, or None.
        """
        leaves = flatten((frozen, params), is_leaf=stored.is_form)
        leaves = {path.partition("/")[2]: leaf for path, leaf in leaves.items()}
        return unflatten(loras.adapt(self.lora, self.adapted, leaves, rng, dtype))

    def merge(self, params: hk.Params, frozen: hk.Params, fetch: Callable) -> hk.Params:
        """Merges `params` of the host and frozen ones to arrays there, one by one.

        `fetch` copies one from its devices. Forms become float32; other dtypes stay.
        """
        return jax.tree.map(
            lambda leaf: np.array(stored.use(fetch(leaf), jnp.float32)),
            self.combine(params, frozen, jnp.float32),
            is_leaf=stored.is_form,
        )


def make_plan(
    finetuning: Finetuning, shapes: hk.Params, convolutions: Axes | None = None
) -> Plan:
    """Resolves a user's patterns on a model's parameters, or on their shapes.

    `convolutions` are axes by path, from the function of this name. Raises
    `ConfigError` if a pattern fits nothing, a fresh parameter would never train, a
    value is out of its range, or LoRA's axes are not known.
    """
    leaves, lora = flatten(shapes), finetuning.lora or Lora(rank=0)
    _check_patterns(finetuning._asdict() | {"lora.patterns": lora.patterns})
    values = {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
    check_some({f"finetuning.lora.{key}": value for key, value in values.items()})
    if finetuning.base_dtype not in DTYPES:
        raise ConfigError(
            f"base_dtype={finetuning.base_dtype!r}; possible are {', '.join(DTYPES)}"
        )
    trained = _select("train", finetuning.train, leaves)
    if not finetuning.train and finetuning.lora is None:
        trained = set(leaves)
    frozen = leaves.keys() - trained
    if finetuning.adapters is not None and not frozen:
        raise ConfigError(
            f"adapters={finetuning.adapters} belong to frozen parameters, and all "
            "parameters are to train; give lora.rank or train"
        )
    if finetuning.base_dtype != "float32" and not frozen:
        raise ConfigError(
            f"base_dtype={finetuning.base_dtype!r} is of frozen parameters, and all "
            "are to train; give lora.rank or train"
        )
    wide = {k: leaves[k] for k in frozen if _is_float(leaves[k])}
    adapted = _adapted(lora, wide, convolutions or {}) if lora.rank else {}
    tensors = ((k, x) for k, x in sorted(adapted.items()) if x != MATRIX)
    lora = lora._replace(axes=tuple(tensors))
    # Patterns with the mark name leaves of the network state.
    of_params = [p for p in finetuning.fresh if not p.startswith(MARK)]
    fresh = _select("fresh", of_params, leaves)
    if stuck := sorted(fresh & frozen):
        raise ConfigError(
            f"{', '.join(stuck[:4])}: fresh parameters that are frozen would never "
            "learn anything; let train name them too, as in "
            f"finetuning.train={finetuning.fresh}"
        )
    names = {path + suffix for path in adapted for suffix in (A, B)}
    _check_multipliers(finetuning.multipliers, trained | names)
    return Plan(
        trained=frozenset(trained),
        adapted=frozenset(adapted),
        frozen=frozenset(frozen),
        fresh=frozenset(fresh),
        lora=lora,
        dtype=finetuning.base_dtype,
        unquantized=frozenset(_unquantized(finetuning, wide)),
    )


def _check_patterns(values: dict[str, Any]) -> None:
    for key in PATTERNS:
        value = values[key]
        if isinstance(value, str) or not all(isinstance(x, str) for x in value):
            raise ConfigError(
                f"finetuning.{key}={value!r}; possible are several patterns, as in "
                "('*/w', 'head/*'), or one, ('*/w',)"
            )


def _unquantized(finetuning: Finetuning, leaves: dict[str, Any]) -> set[str]:
    """Selects parameters without a form: those of the patterns, and vectors."""
    name, patterns = finetuning.base_dtype, finetuning.unquantized
    if patterns != UNQUANTIZED:
        _select("unquantized (frozen parameters)", patterns, leaves)
    return {
        path
        for path, leaf in leaves.items()
        if not quantized.is_possible(name, leaf.shape)
        or any(matching(pattern, [path]) for pattern in patterns)
    }


def scale_updates(multipliers: Multipliers) -> optax.GradientTransformation:
    """Multiplies updates by path: learning-rate multipliers, behind an optimizer.

    The first (pattern, factor) that fits counts; without one the factor is 1.
    Layer-wise decay: `[(f"*/block_{i}/*", 0.8 ** (12 - i)) for i in range(12)]`.
    """

    def scale(module: str, name: str, update: jax.Array) -> jax.Array:
        path = f"{module}/{name}"
        fits = (f for pattern, f in multipliers if matching(pattern, [path]))
        return next(fits, 1.0) * update

    return optax.stateless(lambda updates, _: hk.data_structures.map(scale, updates))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _select(key: str, patterns: Sequence[str], paths: Collection[str]) -> set[str]:
    """Selects paths by the patterns of a key, each of which must fit something."""
    selected = set()
    for pattern in patterns:
        if not (fits := matching(pattern, paths)):
            some = sorted({"/".join(path.split("/")[-2:]) for path in paths})[:SHOWN]
            raise ConfigError(
                f"{key}: the pattern {pattern!r} fits none of the {len(paths)} that "
                f"there are{near(pattern, paths)}"
                + (f"; they end in {', '.join(some)}" if some else "")
            )
        selected |= fits
    return selected


def _adapted(lora: Lora, leaves: dict[str, Any], convolutions: Axes) -> dict[str, str]:
    """Axes by path of the parameters that get adapters."""
    axes: dict[str, str] = {}
    for entry in reversed(lora.axes):  # The first that fits counts.
        axes |= _axes_of_entry(entry, leaves)
    matrices = {path for path, leaf in leaves.items() if leaf.ndim == 2}
    matrices -= matching("*__layer_stack*", matrices)  # Vectors, of each layer.
    for pattern in lora.patterns:
        flat, fits = matching(pattern, matrices), matching(pattern, leaves)
        tensors = sorted(k for k in fits - axes.keys() if leaves[k].ndim > 2)
        if tensors and flat:
            logger.warning(
                "lora: %r fits %s of more than two axes, too (%s %s); they "
                "get no adapters unless config.finetuning.lora.axes names them",
                pattern,
                counted(len(tensors), "parameters"),
                tensors[0],
                list(leaves[tensors[0]].shape),
            )
        elif tensors:
            for path in tensors:
                axes[path] = _axes_of_kernel(path, leaves[path].shape, convolutions)
        elif not fits & axes.keys():
            flat = _select("lora (frozen matrices)", (pattern,), matrices)
        axes = dict.fromkeys(flat, MATRIX) | axes
    return axes


def _axes_of_kernel(path: str, shape: tuple[int, ...], convolutions: Axes) -> str:
    """Axes of a convolution's weights; `ConfigError` for other tensors."""
    axes, count = convolutions.get(path, ""), len(shape) - 2
    if len(axes.split()) != len(shape):
        stack = "each " + "in " * count + "out"
        raise ConfigError(
            f"lora: {path} {list(shape)} is neither a matrix nor a convolution's, and "
            "the patterns do not say which of its axes are inputs; possible are "
            f"config.finetuning.lora.axes=(({path!r}, 'in{' out' * (count + 1)}'),), "
            f"'{'in ' * (count + 1)}out', and for a stack of layers {stack!r}"
        )
    return axes


def _axes_of_entry(entry: tuple[str, str], leaves: dict[str, Any]) -> dict[str, str]:
    """Axes by path of the tensors that an entry of `lora.axes` names."""
    axes = entry[1].split() if len(entry) == 2 else ()
    if not {"in", "out"} <= set(axes) <= set(KINDS):
        raise ConfigError(
            f"lora.axes: {entry!r}; each is a pattern and a word for each axis of a "
            f"tensor, {', '.join(KINDS)}, such as ('*/query_w', 'in out out')"
        )
    fits = sorted(_select("lora.axes (frozen parameters)", entry[:1], leaves))
    tensors = [path for path in fits if leaves[path].ndim == len(axes)]
    if not tensors:
        raise ConfigError(
            f"lora.axes: {entry!r} is for {len(axes)} axes, and {fits[0]} has the "
            f"shape {list(leaves[fits[0]].shape)}"
        )
    return dict.fromkeys(tensors, " ".join(axes))


def _check_multipliers(multipliers: Multipliers, paths: Collection[str]) -> None:
    for entry in multipliers:
        is_pair = isinstance(entry, tuple | list) and len(entry) == 2
        pattern, factor = entry if is_pair else (None, None)
        is_number = isinstance(factor, int | float) and 0 < factor < np.inf
        if not isinstance(pattern, str) or not is_number:
            raise ConfigError(
                f"multipliers: {entry!r}; each is a pattern and a factor of more than "
                "0, such as ('*/embed/*', 0.1); parameters that are not to train are "
                "left out of train"
            )
    _select("multipliers", [pattern for pattern, _ in multipliers], paths)

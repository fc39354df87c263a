"""What trains and what is frozen: parameters by pattern, and how fast each learns.

A parameter's path is its module and its name: `gpt/block_0/attention/qkv/w`. Patterns
are as in a shell: `*` is anything, slashes too, `?` one character, `[ab]` one of them.
"""

import fnmatch
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.errors import ConfigError
from haiku_template.finetuning.lora import A, B, Lora, adapt, init_adapters, is_adapted
from haiku_template.pretrained.reading import flatten, unflatten
from haiku_template.pretrained.rules import near

SHOWN = 20  # Names in a message.
Multipliers = Sequence[tuple[str, float]]


def select(what: str, patterns: Sequence[str], paths: Collection[str]) -> set[str]:
    """The paths that fit one of the patterns.

    Args:
      what: the setting that the patterns come from, for the message.
      patterns: each must fit something.
      paths: what there is.

    Raises:
      ConfigError: a pattern fits nothing; names the nearest path.
    """
    selected = set()
    for pattern in patterns:
        fits = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not fits:
            some = sorted({"/".join(path.split("/")[-2:]) for path in paths})[:SHOWN]
            raise ConfigError(
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
      ConfigError: it does not.
    """
    for entry in multipliers:
        if len(entry) != 2 or not isinstance(entry[1], int | float) or entry[1] <= 0:
            raise ConfigError(
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


BASE_DTYPES = ("float32", "bfloat16")


class Tuning(NamedTuple):
    """What should train, in a user's words.

    Attributes:
      train: patterns of parameters that train whole; none means all, or with `lora`
        none.
      lora: adapters of parameters that do not; None for none.
      fresh: patterns of parameters that start from the seed where others are read.
      base_dtype: of what is frozen: `float32` or `bfloat16`.
      multipliers: see `freezing.scale_updates`.
      adapters: a file of `adapters.save_adapters`, or a folder with one, which what
        trains starts from; None for none.
    """

    train: tuple[str, ...] = ()
    lora: Lora | None = None
    fresh: tuple[str, ...] = ()
    base_dtype: str = "float32"
    multipliers: Multipliers = ()
    adapters: str | None = None


class Plan(NamedTuple):
    """What trains of one model: made by `make_plan`.

    Attributes:
      trained: paths of parameters that train whole.
      adapted: paths of frozen parameters that have an adapter.
      frozen: paths of all frozen parameters.
      fresh: paths of parameters that are not read.
      lora: of the adapters.
      base_dtype: of floating-point leaves of the base.
    """

    trained: frozenset[str]
    adapted: frozenset[str]
    frozen: frozenset[str]
    fresh: frozenset[str]
    lora: Lora
    base_dtype: Any

    def params(self, whole: hk.Params, rng: jax.Array) -> hk.Params:
        """What trains at step 0.

        Args:
          whole: the model's parameters, or at least those that train; of others only
            the shape counts.
          rng: the source of adapters.
        """
        trained, frozen = partition(whole, self.trained)
        shapes = {k: x.shape for k, x in flatten(frozen).items() if k in self.adapted}
        return join(trained, unflatten(init_adapters(self.lora, shapes, rng)))

    def base(self, whole: Any) -> hk.Params:
        """What is frozen, in the base's dtype, of the model's parameters."""
        return jax.tree.map(self._cast, partition(whole, self.trained)[1])

    def combine(
        self, params: hk.Params, base: hk.Params, rng: jax.Array | None = None
    ) -> hk.Params:
        """The model's parameters, of what trains and what is frozen.

        Args:
          params: what trains.
          base: what is frozen, in the same dtype.
          rng: the source of the adapters' dropout; None drops nothing.
        """
        if not self.frozen:
            return params
        leaves = flatten(base) | flatten(params)
        return unflatten(adapt(self.lora, self.adapted, leaves, rng))

    def merge(self, params: hk.Params, base: hk.Params) -> hk.Params:
        """Plain parameters, as `combine`: what was adapted in float32, others as is."""
        leaves = flatten(base)
        wide = {path: leaves[path].astype(jnp.float32) for path in self.adapted}
        return self.combine(params, unflatten(leaves | wide))

    def _cast(self, leaf: Any) -> Any:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(self.base_dtype) if is_float else leaf


def make_plan(tuning: Tuning, shapes: hk.Params) -> Plan:
    """Says which parameters of a model train, and how.

    Args:
      tuning: what should train.
      shapes: of the model's parameters, arrays or `jax.ShapeDtypeStruct`.

    Raises:
      ConfigError: a pattern fits nothing, what starts fresh would never train, or a
        value is out of its range.
    """
    leaves = flatten(shapes)
    lora = _check_lora(tuning.lora or Lora(rank=0))
    if tuning.base_dtype not in BASE_DTYPES:
        raise ConfigError(
            f"base_dtype={tuning.base_dtype!r}; possible are {', '.join(BASE_DTYPES)}"
        )
    trained = select("train", tuning.train, leaves)
    if not tuning.train and tuning.lora is None:
        trained = set(leaves)
    frozen = leaves.keys() - trained
    if tuning.adapters is not None and not frozen:
        raise ConfigError(
            f"adapters={tuning.adapters} belong to a frozen base, and all parameters "
            "are to train; give lora.rank or train"
        )
    adapted = set()
    if lora.rank:
        can = {path for path in frozen if is_adapted(leaves[path])}
        adapted = select("lora (frozen matrices)", lora.patterns, can)
    fresh = select("fresh", tuning.fresh, leaves)
    stuck = sorted(fresh & frozen)
    if stuck:
        raise ConfigError(
            f"{', '.join(stuck[:4])}: fresh parameters that are frozen would never "
            "learn anything; let train name them too, as in "
            f"finetuning.train={tuning.fresh}"
        )
    names = {path + suffix for path in adapted for suffix in (A, B)}
    check_multipliers(tuning.multipliers, trained | names)
    sets = map(frozenset, (trained, adapted, frozen, fresh))
    return Plan(*sets, lora, jnp.dtype(tuning.base_dtype))


def _check_lora(lora: Lora) -> Lora:
    if lora.rank >= 0 and lora.alpha > 0 and 0 <= lora.dropout < 1:
        return lora
    raise ConfigError(
        f"lora: rank={lora.rank}, alpha={lora.alpha} and dropout={lora.dropout} are "
        "not all possible: rank is 0 or more, alpha more than 0, dropout in [0, 1)"
    )

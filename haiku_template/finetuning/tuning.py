"""What of a model trains: the split into `params` and base, and the way back.

`params` is what trains, in float32: it has gradients, optimizer state and checkpoints.
The base is what is frozen: whole on every device, in a dtype of its own, and given to
each step beside the state. Without fine-tuning the base is empty.
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.finetuning.errors import TuningError
from haiku_template.finetuning.freezing import (
    Multipliers,
    check_multipliers,
    join,
    partition,
    select,
)
from haiku_template.finetuning.lora import A, B, Lora, adapt, init_adapters, is_adapted
from haiku_template.finetuning.pretrained import flatten, unflatten

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
      TuningError: a pattern fits nothing, what starts fresh would never train, or a
        value is out of its range.
    """
    leaves = flatten(shapes)
    lora = _check_lora(tuning.lora or Lora(rank=0))
    if tuning.base_dtype not in BASE_DTYPES:
        raise TuningError(
            f"base_dtype={tuning.base_dtype!r}; possible are {', '.join(BASE_DTYPES)}"
        )
    trained = select("train", tuning.train, leaves)
    if not tuning.train and tuning.lora is None:
        trained = set(leaves)
    frozen = leaves.keys() - trained
    if tuning.adapters is not None and not frozen:
        raise TuningError(
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
        raise TuningError(
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
    raise TuningError(
        f"lora: rank={lora.rank}, alpha={lora.alpha} and dropout={lora.dropout} are "
        "not all possible: rank is 0 or more, alpha more than 0, dropout in [0, 1)"
    )

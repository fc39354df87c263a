"""Optimizers and learning-rate schedules by name; all of them are optax's."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import optax

logger = logging.getLogger(__name__)

Schedule = Callable[[Any], Any]
NOT_DECAYED = ("b", "offset", "scale")


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    num_steps: int,
    warmup_steps: int = 0,
    final_fraction: float = 0.0,
) -> Schedule:
    """A linear warm-up from 0, then `cosine`, `linear` or `constant`.

    Args:
      name: the shape after the warm-up.
      learning_rate: the highest value, reached after the warm-up.
      num_steps: when the schedule ends.
      warmup_steps: of `num_steps`; a warm-up as long as the run is cut, so that a long
        run's settings can be tried for a few steps.
      final_fraction: of `learning_rate`, reached at the end; not for `constant`.

    Raises:
      ValueError: another name.
    """
    if warmup_steps >= num_steps:
        cut = max(num_steps - 1, 0)
        logger.warning(
            "warmup_steps=%s leaves nothing of num_steps=%s, and is cut to %s",
            warmup_steps,
            num_steps,
            cut,
        )
        warmup_steps = cut
    steps = num_steps - warmup_steps
    final = learning_rate * final_fraction
    shapes = {
        "cosine": lambda: optax.cosine_decay_schedule(
            learning_rate, steps, alpha=final_fraction
        ),
        "linear": lambda: optax.linear_schedule(learning_rate, final, steps),
        "constant": lambda: optax.constant_schedule(learning_rate),
    }
    if name not in shapes:
        raise ValueError(
            f"schedule {name!r} is not known; possible are {', '.join(shapes)}"
        )
    if not warmup_steps:
        return shapes[name]()
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, shapes[name]()], [warmup_steps])


def matrices(params: Any) -> Any:
    """The weight-decay mask: True for leaves of two or more dimensions.

    Haiku's biases and the scales and offsets of its normalisation layers are left
    out by name, whatever their shape: those of `hk.BatchNorm` have four dimensions.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim > 1 and getattr(path[-1], "key", "") not in NOT_DECAYED,
        params,
    )


def _sgd(
    learning_rate: Schedule,
    weight_decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """SGD with momentum; the decay is added to the gradient, as L2 regularisation."""
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=matrices),
        optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov),
    )


def _adamw(
    learning_rate: Schedule, weight_decay: float, **kwargs: Any
) -> optax.GradientTransformation:
    return optax.adamw(
        learning_rate, weight_decay=weight_decay, mask=matrices, **kwargs
    )


def _lion(
    learning_rate: Schedule, weight_decay: float, **kwargs: Any
) -> optax.GradientTransformation:
    return optax.lion(learning_rate, weight_decay=weight_decay, mask=matrices, **kwargs)


def _adafactor(
    learning_rate: Schedule, weight_decay: float, **kwargs: Any
) -> optax.GradientTransformation:
    """Adafactor; its decay is a share of the learning rate, as the others' are."""
    adafactor = optax.adafactor(learning_rate, **kwargs)
    if not weight_decay:
        return adafactor  # optax's own decay is a share of the weights a step.
    return optax.chain(
        adafactor,
        optax.add_decayed_weights(
            lambda step: -weight_decay * learning_rate(step), mask=matrices
        ),
    )


# The keys that each takes besides learning_rate and weight_decay.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "adamw": (_adamw, ("b1", "b2")),
    "sgd": (_sgd, ("momentum", "nesterov")),
    "lion": (_lion, ("b1", "b2")),
    "adafactor": (_adafactor, ("momentum",)),
}


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    **kwargs: Any,
) -> optax.GradientTransformation:
    """Clipping by global norm, then `adamw`, `sgd`, `lion` or `adafactor`.

    Args:
      name: which optimizer.
      schedule: learning rate as a function of the step.
      weight_decay: for the leaves that `matrices` names.
      clip_norm: the gradient's largest global norm; None means no clipping.
      **kwargs: the optimizer's own (`b1`, `b2`, `momentum`, `nesterov`); None means
        its default.

    Raises:
      ValueError: another name, or a key that this optimizer does not take.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"optimizer {name!r} is not known; possible are {', '.join(OPTIMIZERS)}"
        )
    make, keys = OPTIMIZERS[name]
    given = {key: value for key, value in kwargs.items() if value is not None}
    for key in given:
        if key not in keys:
            raise ValueError(
                f"optimizer {name} takes no {key}; besides learning_rate and "
                f"weight_decay it takes {', '.join(keys)}"
            )
    optimizer = make(schedule, weight_decay, **given)
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

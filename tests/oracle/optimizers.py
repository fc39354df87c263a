"""Schedules and optimizers as the documentation says them, of plain optax."""

import jax.numpy as jnp
import optax

# How each decays, by `config.optimizer.weight_decay`. L2: added to the gradient.
L2 = ("sgd", "lars", "adadelta", "cocob")
# Optax's own argument, of matrices: within a trust ratio, or times an estimated rate.
OWN = ("lamb", "dog", "dowg", "galore")
# Optax's own argument, of all parameters, since it takes no mask.
OF_ALL = ("madgrad", "momo", "momo_adam", "novograd")
OF_ALL += ("schedule_free_adamw", "schedule_free_sgd", "dadapt_adamw", "prodigy")
# Times the learning rate, of matrices.
DECOUPLED = (
    *("acprop", "adabelief", "adafactor", "adagrad", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "ademamix", "adopt", "amsgrad", "fromage", "lion", "muon"),
    *("nadam", "nadamw", "optimistic_adam_v2", "optimistic_gradient_descent"),
    *("radam", "rmsprop", "sign_sgd", "signum", "simplified_ademamix", "yogi"),
)
# A user's: one takes neither decay nor clipping, and has them around it.
USERS = ("tests.oracle.optimizers:slow", "tests.oracle.optimizers:whole")
NAMES = (*L2, *OWN, *OF_ALL, *DECOUPLED, *USERS)
KEYS = ("b1", "b2", "momentum", "nesterov", "mu_dtype", "rank", "update_proj_gap")
KEYS += ("eps", "estim_lr0", "share")


def slow(schedule, share):
    """A user's optimizer with a key of its own."""
    return optax.sgd(lambda step: share * schedule(step))


def whole(schedule, weight_decay, clip_norm):
    """A user's optimizer that decays, and clips what the schedule makes."""
    parts = [optax.scale_by_rms(), optax.add_decayed_weights(weight_decay)]
    parts += [optax.scale_by_learning_rate(schedule)]
    return optax.chain(*parts, optax.clip_by_global_norm(clip_norm or 1.0))


def falling(learning_rate, num_steps, warmup_steps, final_fraction):
    """A user's schedule."""
    end = num_steps + warmup_steps
    return lambda step: learning_rate * (1 - (1 - final_fraction) * step / end)


def make_schedule(config, num_steps):
    """Learning rate of a step, from 0: linear from 0, then by name."""
    rate, warmup = config["optimizer.learning_rate"], config["optimizer.warmup_steps"]
    warmup = min(warmup, num_steps - 1)  # A warm-up of all steps is cut.
    name, steps = config["optimizer.schedule"], num_steps - warmup
    end = config["optimizer.final_fraction"]
    if ":" in name:
        return falling(rate, num_steps, warmup, end)

    def schedule(step):
        past = jnp.clip((step - warmup) / steps, 0, 1)  # Share of the decay.
        if name == "cosine":
            fall = (1 + jnp.cos(jnp.pi * past)) / 2
        elif name == "linear":
            fall = 1 - past
        elif name == "wsd":  # The last fifth.
            tail = max(round(steps / 5), 1)
            fall = 1 - jnp.clip((step - warmup - steps + tail) / tail, 0, 1)
        else:
            fall = 1.0
        rising = step / max(warmup, 1)
        return rate * jnp.where(step < warmup, rising, end + (1 - end) * fall)

    return schedule


def matrices(params):
    """Mask of flat parameters: matrices, and neither biases nor norms."""
    names = ("b", "scale", "offset")
    return {k: x.ndim > 1 and k.split("/")[-1] not in names for k, x in params.items()}


def make_optimizer(config, schedule):
    """Clipping, then the optimizer, with its decay."""
    name, decay = config["optimizer.name"], config["optimizer.weight_decay"]
    options = {k: x for k in KEYS if (x := config.get(f"optimizer.{k}")) is not None}
    if name in USERS:
        function = {"slow": slow, "whole": whole}[name.partition(":")[2]]
    else:
        function = getattr(optax, name, None) or getattr(optax.contrib, name)
    if name == "sgd":
        options = {"momentum": 0.9} | options
    if name in OWN:
        options |= {"weight_decay": decay, "mask": matrices}
    elif name in OF_ALL:
        options["weight_decay"] = decay
    elif name in ("adamw", "lion", "adamaxw", "nadamw", "lars"):  # Optax's is not 0.
        options["weight_decay"] = 0.0
    norm = config.get("optimizer.clip_norm")
    if name.endswith(":whole"):
        return whole(schedule, decay, norm)
    parts = [function(schedule, **options)]
    if name in L2:
        parts.insert(0, optax.add_decayed_weights(decay, mask=matrices))
    if name in DECOUPLED or name in USERS:
        decayed = optax.add_decayed_weights(
            lambda step: -decay * schedule(step), mask=matrices
        )
        parts.append(decayed)
    if norm is not None:
        parts.insert(0, optax.clip_by_global_norm(norm))
    return optax.chain(*parts)

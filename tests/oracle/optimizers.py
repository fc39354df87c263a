"""Schedules and optimizers as the documentation says them, of plain optax."""

import jax.numpy as jnp
import optax

# How each decays, by `config.optimizer.weight_decay`. L2: added to the gradient.
L2 = ("sgd", "lars", "adadelta", "cocob")
# Optax's own argument, of matrices: within a trust ratio, or times an estimated rate.
OWN = ("lamb", "dog", "dowg")
# Optax's own argument, of all parameters, since it takes no mask.
OF_ALL = ("madgrad", "momo", "momo_adam", "novograd")
OF_ALL += ("schedule_free_adamw", "schedule_free_sgd")
# Times the learning rate, of matrices.
DECOUPLED = (
    *("acprop", "adabelief", "adafactor", "adagrad", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "ademamix", "adopt", "amsgrad", "fromage", "lion", "muon"),
    *("nadam", "nadamw", "optimistic_adam_v2", "optimistic_gradient_descent"),
    *("radam", "rmsprop", "sign_sgd", "signum", "simplified_ademamix", "yogi"),
)
NAMES = (*L2, *OWN, *OF_ALL, *DECOUPLED)


def make_schedule(config, num_steps):
    """Learning rate of a step, from 0: linear from 0, then by name."""
    rate, warmup = config["optimizer.learning_rate"], config["optimizer.warmup_steps"]
    warmup = min(warmup, num_steps - 1)  # A warm-up of all steps is cut.
    name, steps = config["optimizer.schedule"], num_steps - warmup
    end = config["optimizer.final_fraction"]

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
    keys = {"b1", "b2", "momentum", "nesterov"}
    options = {k: x for k in keys if (x := config.get(f"optimizer.{k}")) is not None}
    function = getattr(optax, name, None) or getattr(optax.contrib, name)
    if name == "sgd":
        options = {"momentum": 0.9} | options
    if name in OWN:
        options |= {"weight_decay": decay, "mask": matrices}
    elif name in OF_ALL:
        options["weight_decay"] = decay
    elif name in ("adamw", "lion", "adamaxw", "nadamw", "lars"):  # Optax's is not 0.
        options["weight_decay"] = 0.0
    parts = [function(schedule, **options)]
    if name in L2:
        parts.insert(0, optax.add_decayed_weights(decay, mask=matrices))
    if name in DECOUPLED:
        decayed = optax.add_decayed_weights(
            lambda step: -decay * schedule(step), mask=matrices
        )
        parts.append(decayed)
    if (norm := config.get("optimizer.clip_norm")) is not None:
        parts.insert(0, optax.clip_by_global_norm(norm))
    return optax.chain(*parts)

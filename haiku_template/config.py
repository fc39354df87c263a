"""The configuration of a run: the defaults, what is possible, what was saved.

A config file is Python and returns `default_config()` with changes; a workdir keeps
the resolved values as JSON, and only that is read again. Imports no JAX.
"""

import json
from pathlib import Path
from typing import Any

from ml_collections import config_dict


class ConfigError(ValueError):
    """A configuration that cannot be run."""

    exit_code = 64


def default_config() -> config_dict.ConfigDict:
    """Every key that a run has, complete: config files change some of them.

    Intervals count steps; None means never. `model`, `data` and `task` name an entry
    of the tables in `models`, `data` and `training.tasks`, or a function of yours as
    `module:function`; their other keys are its keyword arguments.
    """
    config = config_dict.ConfigDict()
    config.seed = 0  # Initial parameters, order of the data, dropout.
    config.num_steps = 1000  # Optimizer updates in all.
    config.batch_size = 128  # Examples in each update, over all devices.
    config.accumulate_steps = 1  # Parts of a batch worked through in turn, for memory.
    config.precision = "float32"  # Or bfloat16, or float16 with loss scaling.
    config.ema_decay = config_dict.placeholder(float)  # Evaluate averages; e.g. 0.999.

    config.log_every = 50  # Steps between lines of training metrics.
    config.eval_every = config_dict.placeholder(int)  # And once at the end.
    config.save_every = config_dict.placeholder(int)  # And once at the end.
    config.keep_last = 2  # Checkpoints, the newest.
    config.keep_best = 1  # Checkpoints, the best of those that were evaluated.
    config.best_metric = "eval/loss"  # What is best.
    config.best_mode = "min"  # Or max.

    config.task = {"name": "classification"}  # Or regression.
    config.data = {"name": "digits"}
    config.model = {"name": "mlp"}

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "adamw"  # Or sgd, lion, adafactor.
    config.optimizer.learning_rate = 1e-3  # The highest value of the schedule.
    config.optimizer.schedule = "cosine"  # After the warm-up; or linear, constant.
    config.optimizer.warmup_steps = 0  # Linear, from 0.
    config.optimizer.final_fraction = 0.0  # Of learning_rate, at the end.
    config.optimizer.weight_decay = 0.0  # For leaves of two or more dimensions.
    config.optimizer.clip_norm = config_dict.placeholder(float)  # Global norm.
    config.optimizer.b1 = config_dict.placeholder(float)  # adamw, lion.
    config.optimizer.b2 = config_dict.placeholder(float)  # adamw, lion.
    config.optimizer.momentum = config_dict.placeholder(float)  # sgd, adafactor.
    config.optimizer.nesterov = config_dict.placeholder(bool)  # sgd.
    return config


AT_LEAST_ONE = ("num_steps", "batch_size", "accumulate_steps", "log_every", "keep_last")
AT_LEAST_ONE_OR_NONE = ("eval_every", "save_every")


def to_dict(config: config_dict.ConfigDict) -> dict[str, Any]:
    """The resolved values as plain JSON types.

    Raises:
      ConfigError: a value that JSON cannot hold; the message names its key.
    """
    values = config.to_dict()
    for key, value in flatten(values).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"config.{key} is a {type(value).__name__}, which cannot be saved; "
                "possible are numbers, strings, booleans, None and tuples of them"
            ) from error
    return json.loads(json.dumps(values))


def from_dict(values: dict[str, Any]) -> config_dict.ConfigDict:
    """The config that `to_dict` gave these values for."""

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tuples(item) for key, item in value.items()}
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return config_dict.ConfigDict(tuples(values))


def load(path: Path) -> config_dict.ConfigDict:
    """Reads the JSON that a workdir keeps.

    Raises:
      ConfigError: the file is missing or damaged.
    """
    try:
        return from_dict(json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.parent} is not the workdir of a run: it has no {path.name}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def check(config: config_dict.ConfigDict) -> None:
    """Asserts what every run needs of its config.

    Raises:
      ConfigError: a key is missing, unknown or out of range; names it.
    """
    expected = default_config()
    for key in expected:
        if key not in config:
            raise ConfigError(
                f"the config has no key {key!r}; start from "
                "haiku_template.config.default_config()"
            )
    for key in config:
        if key not in expected:
            raise ConfigError(
                f"the config has an unknown key {key!r}; possible are "
                f"{', '.join(sorted(expected))}"
            )
    for key in AT_LEAST_ONE + AT_LEAST_ONE_OR_NONE:
        value = config[key]
        if value is None and key in AT_LEAST_ONE_OR_NONE:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.{key}={value}; possible are whole numbers from 1")
    if config.keep_best < 0:
        raise ConfigError(f"config.keep_best={config.keep_best}; 0 keeps none")
    if config.best_mode not in ("min", "max"):
        raise ConfigError(f"config.best_mode={config.best_mode!r}; min or max")
    decay = config.ema_decay
    if decay is not None and not 0 <= decay < 1:
        raise ConfigError(f"config.ema_decay={decay}; possible are None and 0 to 1")
    if not config.optimizer.learning_rate >= 0:
        raise ConfigError(
            f"config.optimizer.learning_rate={config.optimizer.learning_rate} is "
            "negative or no number"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What changed between two saved configs, a line for each key."""
    before, after = flatten(old), flatten(new)
    absent = "absent"
    return [
        f"{key}: {before.get(key, absent)!r} there, {after.get(key, absent)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

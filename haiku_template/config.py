"""Configuration of a run: defaults, ranges, and the JSON in a workdir.

A config file is Python and returns `default_config()` with changes; a workdir keeps the
resolved values as JSON, and only that is read again. Imports no JAX.
"""

import difflib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from haiku_template.errors import ConfigError

logger = logging.getLogger(__name__)


def default_config() -> config_dict.ConfigDict:
    """Makes the complete config with all default values; config files change some.

    Intervals count steps; None means at the last step alone. `model`, `data` and `task`
    name an entry of the tables in `models`, `data` and `training.tasks`, or a function
    of yours as `module:function`; their other keys are its keyword arguments.
    """
    config = config_dict.ConfigDict()
    config.seed = 0  # Initial parameters, order of the data, dropout.
    config.num_steps = 1000  # Optimizer updates in all.
    config.batch_size = 128  # Examples in each update, over all devices.
    config.accumulate_steps = 1  # Gradient accumulation: micro-batches.
    config.precision = "float32"  # Or bfloat16, or float16 with loss scaling.
    config.ema_decay = config_dict.placeholder(float)  # Evaluate averages; e.g. 0.999.

    config.log_every = 50  # Steps between lines of training metrics.
    config.eval_every = config_dict.placeholder(int)  # And once at the end.
    config.save_every = config_dict.placeholder(int)  # And once at the end.
    config.keep_last = 2  # Checkpoints, the newest.
    config.keep_best = 1  # Checkpoints, the best of those that were evaluated.
    config.best_metric = "eval/loss"  # Ranks checkpoints.
    config.best_mode = "min"  # Or max.

    config.writers = ()  # Of metrics, as module:function, beside those of the workdir.
    config.early_stop = config_dict.ConfigDict()
    config.early_stop.metric = "eval/loss"  # To be improved.
    config.early_stop.mode = "min"  # Or max.
    config.early_stop.patience = config_dict.placeholder(int)  # Evaluations; None: off.

    # Modules of yours in place of training/loop.py and training/step.py, of which
    # `make new EJECT=loop` gives copies to change.
    config.loop = config_dict.placeholder(str)
    config.step = config_dict.placeholder(str)

    config.task = {"name": "classification"}  # Or regression.
    # Training data on the host; or staged on each device; or auto: staged if it fits.
    config.data = {"name": "digits", "placement": "host"}
    config.model = {"name": "mlp"}

    # A workdir, a Hugging Face folder, or a safetensors file to start from; or None.
    config.init_from = config_dict.placeholder(str)
    # Patterns are of parameters, `module/name`, as in a shell: "gpt/block_1?/*".
    config.finetuning = config_dict.ConfigDict()
    config.finetuning.train = ()  # Patterns; all by default, or with lora none.
    config.finetuning.fresh = ()  # Patterns, not in init_from: such as a new head.
    config.finetuning.base_dtype = "float32"  # Of frozen parameters; or bfloat16.
    config.finetuning.multipliers = ()  # Of the learning rate: (pattern, factor) each.
    # A folder or file of exported adapters to start from; or None.
    config.finetuning.adapters = config_dict.placeholder(str)
    config.finetuning.lora = config_dict.ConfigDict()
    config.finetuning.lora.rank = config_dict.placeholder(int)  # None: no adapters.
    config.finetuning.lora.alpha = 16.0  # LoRA scale times rank.
    config.finetuning.lora.dropout = 0.0  # Share of dropped rows of A.
    config.finetuning.lora.patterns = ("*/w",)  # Among those of two dimensions.

    config.optimizer = _default_optimizer()
    return config


def _default_optimizer() -> config_dict.ConfigDict:
    optimizer = config_dict.ConfigDict()
    optimizer.name = "adamw"  # Or sgd, lion, adafactor, muon: any of optax's.
    optimizer.learning_rate = 1e-3  # The highest value of the schedule.
    optimizer.schedule = "cosine"  # After the warm-up; or linear, constant, wsd.
    optimizer.warmup_steps = 0  # Linear, from 0.
    optimizer.final_fraction = 0.0  # Of learning_rate, at the end.
    optimizer.weight_decay = 0.0  # For leaves of two or more dimensions.
    optimizer.clip_norm = config_dict.placeholder(float)  # Global norm.
    optimizer.b1 = config_dict.placeholder(float)  # adamw, lion.
    optimizer.b2 = config_dict.placeholder(float)  # adamw, lion.
    optimizer.momentum = config_dict.placeholder(float)  # sgd, adafactor.
    optimizer.nesterov = config_dict.placeholder(bool)  # sgd.
    return optimizer


# Keys that hold keys of their own, the same in every run.
NODES = ("early_stop", "optimizer", "finetuning", "finetuning.lora")
FREE = "optimizer."  # It takes the optimizer's own keys; those left out are defaults.


def to_dict(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Converts a config to plain JSON types, references resolved.

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
    """Inverse of `to_dict`."""

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tuples(item) for key, item in value.items()}
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return config_dict.ConfigDict(tuples(values))


def load(path: Path) -> config_dict.ConfigDict:
    """Reads a saved config, or raises `ConfigError` if it is missing or damaged."""
    try:
        return from_dict(completed(json.loads(path.read_text())))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.parent} is not the workdir of a run: it has no {path.name}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def of_run(workdir: Path) -> config_dict.ConfigDict:
    """Reads and checks the config of the run in `workdir`.

    Raises:
      ConfigError: there is no run, or a script made it without a config.
    """
    saved = load(workdir / "config.json")
    if not saved:
        raise ConfigError(
            f"the run in {workdir} was made by a script, without a config; use it "
            "from that script"
        )
    if "model_type" in saved:
        raise ConfigError(
            f"{workdir} is a folder of Hugging Face's and not the workdir of a run; "
            "training starts from it with --config.init_from"
        )
    check(saved)
    _check_imports(workdir, saved)
    return saved


def _check_imports(workdir: Path, saved: config_dict.ConfigDict) -> None:
    """Logs the modules that a run's config imports; refuses those of the workdir."""
    named = {f"{key}.name": str(saved[key].name) for key in ("model", "data", "task")}
    named |= {
        f"optimizer.{key}": str(saved.optimizer.get(key))
        for key in ("name", "schedule")
    }
    named |= {f"writers[{i}]": name for i, name in enumerate(saved.writers)}
    named = {key: name for key, name in named.items() if ":" in name}
    named |= {key: saved[key] for key in ("loop", "step") if saved[key] is not None}
    for key, name in named.items():
        for file in _files_of(name.partition(":")[0]):
            if any(
                reading(file).is_relative_to(reading(workdir))
                for reading in (Path.absolute, Path.resolve)
            ):
                raise ConfigError(
                    f"config.{key}={name!r} of {workdir} is inside that very "
                    f"directory ({file}); a run's code is imported only from where the "
                    "command is run, never from a workdir: others may have written it"
                )
            if file.suffix:
                _say(f"config.{key}: {name} from {file}")


@functools.cache
def _say(words: str) -> None:
    """Warns once in a process; commands read a run's config before they open it."""
    logger.warning(words)


def _files_of(module: str) -> Iterator[Path]:
    """Finds the files that importing a module would run, without running any."""
    path, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return
        path = spec.submodule_search_locations
        if spec.has_location:
            yield Path(spec.origin)
        elif path is not None:
            yield from map(Path, path)


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Adds keys that came later to a saved config; an empty one stays empty."""
    if not values:
        return values
    defaults = to_dict(default_config())
    tuning = defaults["finetuning"] | values.get("finetuning", {})
    later = {key: defaults[key] for key in ("init_from", "loop", "step")}
    later |= {key: defaults[key] for key in ("writers", "early_stop")}
    return later | values | {"finetuning": tuning}


def check(config: config_dict.ConfigDict) -> None:
    """Checks keys, types and ranges of a config.

    Raises:
      ConfigError: a key is missing, unknown, of the wrong type or out of range; the
        message names it and the possible values.
    """
    _check_node(config, default_config(), "")
    values = flatten(config.to_dict())
    for key, (possible, words) in RANGES.items():
        if values.get(key) is not None and not possible(values[key]):
            raise ConfigError(f"config.{key}={values[key]}; possible is {words}")


def _check_node(
    config: config_dict.ConfigDict, expected: config_dict.ConfigDict, prefix: str
) -> None:
    for key in config:
        cutoff = 0.8 if prefix == FREE else 0.6
        near = difflib.get_close_matches(key, expected, n=1, cutoff=cutoff)
        if key not in expected and (near or prefix != FREE):
            guess = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"the config has an unknown key {prefix}{key}{guess}; possible are "
                f"{', '.join(sorted(expected))}"
            )
    for key, default in expected.items():
        if key not in config and prefix == FREE:
            continue
        if key not in config:
            raise ConfigError(
                f"the config has no key {prefix}{key}; start from "
                "haiku_template.config.default_config()"
            )
        if isinstance(default, config_dict.ConfigDict):
            if not isinstance(config[key], config_dict.ConfigDict):
                raise ConfigError(
                    f"config.{prefix}{key} must have a name and its own keys"
                )
            if f"{prefix}{key}" in NODES:
                _check_node(config[key], default, f"{prefix}{key}.")
            elif "name" not in config[key]:
                raise ConfigError(f"the config has no key {key}.name")
            continue
        kind = expected.get_type(key)
        _check_type(f"{prefix}{key}", config[key], kind, default is None)


def _check_type(key: str, value: Any, kind: type, may_be_none: bool) -> None:
    if value is None and may_be_none:
        return
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (
        kind is not bool and isinstance(value, bool)
    ):
        words = {int: "a whole number", float: "a number", str: "text"}
        wanted = (words | {tuple: "a tuple"}).get(kind, "True or False")
        raise ConfigError(
            f"config.{key}={value!r} has the wrong type; possible is {wanted}"
            f"{' or None' if may_be_none else ''}"
        )


def interval(text: str, num_steps: int) -> tuple[int, int]:
    """Reads `START:STOP`, the steps after START up to STOP, or raises `ConfigError`."""
    start, _, stop = text.partition(":")
    if start.isdecimal() and stop.isdecimal() and int(start) < int(stop) <= num_steps:
        return int(start), int(stop)
    raise ConfigError(
        f"--profile={text} is no interval of steps; possible is START:STOP with "
        f"0 <= START < STOP <= {num_steps}, such as --profile=10:20 for the ten steps "
        "after the tenth"
    )


# A resumed run may change them: they do not change its mathematics, but for a schedule
# that ends with the last step.
MAY_CHANGE = (
    "num_steps",
    "log_every",
    "eval_every",
    "save_every",
    "keep_last",
    "keep_best",
    "writers",
    "early_stop",
)


def fixed(values: dict[str, Any]) -> dict[str, Any]:
    """Drops the keys of a saved config that may change when a run resumes."""
    return {key: value for key, value in values.items() if key not in MAY_CHANGE}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compares two saved configs: a line for each key that differs."""
    before, after = flatten(old), flatten(new)
    absent = "absent"
    return [
        f"{key}: {before.get(key, absent)!r} there, {after.get(key, absent)!r} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries to dotted keys."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _texts(value: tuple) -> bool:
    return all(isinstance(item, str) for item in value)


# Ranges of values; None is checked against the type alone.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "num_steps",
            "batch_size",
            "accumulate_steps",
            "log_every",
            "eval_every",
            "save_every",
            "keep_last",
        ),
        # A step is an int32.
        (lambda value: 1 <= value < 2**31, "1 or more, up to 2**31 - 1"),
    ),
    **dict.fromkeys(
        (
            "keep_best",
            "optimizer.learning_rate",
            "optimizer.warmup_steps",
            "optimizer.final_fraction",
            "optimizer.weight_decay",
        ),
        (lambda value: value >= 0, "0 or more"),
    ),
    "early_stop.patience": (lambda value: value >= 1, "None, or 1 or more"),
    "early_stop.mode": (lambda value: value in ("min", "max"), "min or max"),
    "seed": (lambda value: 0 <= value < 2**32, "0 to 2**32 - 1"),
    "optimizer.b1": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "optimizer.b2": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "ema_decay": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "optimizer.clip_norm": (lambda value: value > 0, "None, or more than 0"),
    "finetuning.lora.rank": (lambda value: value >= 0, "None, or 0 or more"),
    "finetuning.lora.alpha": (lambda value: value > 0, "more than 0"),
    "finetuning.lora.dropout": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    **dict.fromkeys(
        ("finetuning.train", "finetuning.fresh", "finetuning.lora.patterns"),
        (_texts, "a tuple of patterns, such as ('*/head/*',)"),
    ),
    "best_mode": (lambda value: value in ("min", "max"), "min or max"),
}

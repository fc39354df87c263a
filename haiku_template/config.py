"""Configuration of a run: defaults, ranges, and the JSON in a workdir.

A config file is Python and returns `default_config()` with changes; a workdir keeps the
resolved values as JSON, and only that is read again. Imports no JAX.

Intervals count steps; None means at the last step alone. `model`, `data` and `task`
name an entry of the tables in `models`, `data` and `training.tasks`, or a function of
yours as `module:function`; their other keys are its keyword arguments. Any model has
two more: `per_example`, and `remat`, a tuple of patterns such as `*/block_*` of its
modules, which are then computed again in the backward pass and not kept.
"""

import contextlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from haiku_template.bounded import parse, read_json
from haiku_template.errors import MEANT, ConfigError, near
from haiku_template.registry import check_name
from haiku_template.trust import check_files, warn_once

# Keys with a name, `module:function` perhaps, and that function's own keys; and the
# names in the tables of `models`, `data` and `training.tasks`, which import JAX.
NAMED = {
    "model": ("bert", "gpt", "mlp", "resnet"),
    "data": (
        *("digits", "npz", "safetensors", "npy", "mnist", "cifar10"),
        *("jsonl", "tokens", "bytes"),
    ),
    "task": ("classification", "language_model", "own_loss", "regression"),
}
# Keyword arguments of the loop.
LOOP_KEYS = ("num_steps", "log_every", "eval_every", "save_every", "keep_last")
LOOP_KEYS += ("keep_best", "best_metric", "best_mode", "max_failed_saves")
LOOP_KEYS += ("max_consecutive_nonfinite", "watchdog_minutes", "sdc_replay")
LOOP_KEYS += ("save_minutes", "mirror")
# A resumed run may change these keys, which do not change its mathematics, but for a
# schedule that ends with the last step. Why: docs/decisions/training.md#may-change
MAY_CHANGE = {*LOOP_KEYS, "writers", "early_stop", "compat", "sharding", "data.workers"}
MAY_CHANGE |= {"hooks", "num_epochs", "eval_batches", "max_minutes"}
MAY_CHANGE |= {"optimizer.shard_moments"}  # A rule of `sharding`.
MAY_CHANGE -= {"best_metric", "best_mode"}
REPLAYED = re.compile(r"first:[1-9]\d{0,8}(,every:[1-9]\d{0,8})?|every:[1-9]\d{0,8}")
TYPES = {int: "a whole number", float: "a number", str: "text", tuple: "a tuple"}
TYPES |= {bool: "True or False"}
# What `ast.literal_eval` raises for text that is none, or deep.
NO_LITERAL = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)
# What others call keys of a config, and flags.
ALIASES = {
    **dict.fromkeys(("epochs", "max_epochs", "num_train_epochs"), "num_epochs"),
    **dict.fromkeys(("steps", "max_steps", "training_steps"), "num_steps"),
    "iterations": "num_steps",
    **dict.fromkeys(("lr", "learning_rate"), "optimizer.learning_rate"),
    **dict.fromkeys(("warmup", "warmup_steps"), "optimizer.warmup_steps"),
    **dict.fromkeys(("grad_clip", "gradient_clip_val"), "optimizer.clip_norm"),
    "clipnorm": "optimizer.clip_norm",
    **dict.fromkeys(("max_grad_norm", "clip"), "optimizer.clip_norm"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("bs", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("amp", "fp16", "bf16", "mixed_precision", "dtype"), "precision"),
    **dict.fromkeys(("eval_interval", "eval_steps"), "eval_every"),
    "val_check_interval": "eval_every",
    **dict.fromkeys(("save_interval", "save_steps"), "save_every"),
    "every_n_train_steps": "save_every",
    "train_time_interval": "save_minutes",
    "save_checkpoint_interval": "save_minutes",
    **dict.fromkeys(("save_top_k", "save_best_only"), "keep_best"),
    **dict.fromkeys(("monitor", "best_model_eval_metric"), "best_metric"),
    **dict.fromkeys(("wandb", "logger"), "writers"),
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "gradient_accumulation_steps": "accumulate_steps",
    "accumulate_grad_batches": "accumulate_steps",
    **{x: f"early_stop.{x}" for x in ("patience", "min_delta")},
    "num_workers": "data.workers",
    "dataset": "data.name",
    **dict.fromkeys(("ema", "use_ema"), "ema_decay"),
    "pretrained": "init_from",
    **dict.fromkeys(("log_interval", "log_every_n_steps"), "log_every"),
    "log_train_data_interval": "log_every",
    **dict.fromkeys(("save_total_limit", "max_checkpoints_to_keep"), "keep_last"),
    "random_seed": "seed",
    "steps_per_execution": "steps_per_call",
    "max_time": "max_minutes",
    **dict.fromkeys(("limit_val_batches", "validation_steps"), "eval_batches"),
}
# Keys that earlier versions had: they changed no number.
RETIRED = {"config.finetuning.features", "config.finetuning.features_dir"}
EXPORTED = (
    "; a run starts from it with --config.init_from=FOLDER, and where a run exported "
    "it, that run's workdir is evaluated"
)


def default_config() -> ConfigDict:
    """Makes the complete config with all default values; config files change some."""
    config = ConfigDict()
    config.seed = 0  # Initial parameters, order of the data, dropout.
    config.num_steps = 1000  # Optimizer updates in all.
    config.num_epochs = config_dict.placeholder(float)  # Of a command, in their place.
    config.max_minutes = config_dict.placeholder(float)  # Of a start: saved, and ended.
    config.batch_size = 128  # Examples in each update, over all devices.
    config.accumulate_steps = 1  # Gradient accumulation: micro-batches.
    # Steps in one call of the devices; None: several if a step has few operations.
    config.steps_per_call = config_dict.placeholder(int)
    config.exact_elastic = config_dict.placeholder(int)  # Logical shares, or None.
    config.precision = "float32"  # Or bfloat16, or float16 with loss scaling.
    # Layout of the train state, (pattern of paths, mesh axis or None) each, the first
    # that fits: (("opt_state/*", "data"),) shards the moments, (("*", "data"),) all.
    config.sharding = ()
    config.reduce_dtype = config_dict.placeholder(str)  # Of all-reduces: bfloat16.
    config.ema_decay = config_dict.placeholder(float)  # Evaluate averages; e.g. 0.999.

    config.log_every = 50  # Steps between lines of training metrics.
    config.eval_every = config_dict.placeholder(int)  # And once at the end.
    config.eval_batches = config_dict.placeholder(int)  # The first ones; None for all.
    _add_saving(config)
    config.max_consecutive_nonfinite = 1  # Steps, which end the run; fewer are skipped.
    config.watchdog_minutes = config_dict.placeholder(float)  # Without progress: ends.
    config.sdc_replay = config_dict.placeholder(str)  # Made twice: first:8,every:1000.

    config.writers = ()  # csv, hparams, mlflow, wandb; or yours as module:function.
    config.hooks = ()  # At evaluations: histograms, images, samples; or yours, too.
    # Metric to improve, by more than min_delta; mode is min or max.
    config.early_stop = {"metric": "eval/loss", "mode": "min", "min_delta": 0.0}
    config.early_stop.patience = config_dict.placeholder(int)  # Evaluations; None: off.

    # Modules of yours for runs/loop.py and training/step.py: `make new EJECT=loop`.
    config.loop = config_dict.placeholder(str)
    config.step = config_dict.placeholder(str)
    config.compat = False  # Put back what JAX removed, as compat.py; or True.

    config.task = {"name": "classification"}  # Or regression; own_loss, the model's.
    # Training data on the host; or staged on each device; or auto: staged if it fits.
    # Batches are made by so many processes beside the run's own, or by a thread of it.
    config.data = {"name": "digits", "placement": "host", "workers": 0}
    config.model = {"name": "mlp"}  # per_example=True: of one example, mapped by vmap.

    # To start from: a workdir, Hugging Face folder, Orbax tree, safetensors or .npz.
    config.init_from = config_dict.placeholder(str)
    config.finetuning = _default_finetuning()
    config.optimizer = _default_optimizer()
    return config


def _add_saving(config: ConfigDict) -> None:
    config.save_every = config_dict.placeholder(int)  # And once at the end.
    # And so many minutes after the last save began; 0: once the last is on disk.
    config.save_minutes = config_dict.placeholder(float)
    # A folder on another disk, for copies of the checkpoints and what resumes them.
    config.mirror = config_dict.placeholder(str)
    config.keep_last = 2  # Checkpoints, the newest.
    config.keep_best = 1  # Checkpoints, the best of those that were evaluated.
    config.best_metric = "eval/loss"  # Ranks checkpoints.
    config.best_mode = "min"  # Or max.
    config.max_failed_saves = 3  # In a row, which end the run; fewer are warnings.


def _default_finetuning() -> ConfigDict:
    # Patterns are of parameters, `module/name`, as in a shell: "gpt/block_1?/*".
    tuning = ConfigDict()
    tuning.train = ()  # Patterns; all by default, or with lora none.
    tuning.fresh = ()  # Patterns, not in init_from: such as a new head.
    tuning.ignore = ()  # Patterns of what may be left over in init_from.
    # Names in init_from and in the model, such as ("old/*", "new/*"); the first fits.
    tuning.rename = ()
    tuning.base_dtype = "float32"  # Of frozen parameters; or bfloat16, int8, nf4.
    # Patterns of those that then stay bfloat16; so do all vectors.
    tuning.unquantized = ("*embed*", "*/b", "*_b", "*bias*", "*scale", "*offset")
    tuning.multipliers = ()  # Of the learning rate: (pattern, factor) each.
    # A folder or file of exported adapters to start from; or None.
    tuning.adapters = config_dict.placeholder(str)
    tuning.lora = ConfigDict()
    tuning.lora.rank = config_dict.placeholder(int)  # None: no adapters.
    tuning.lora.alpha = 16.0  # LoRA scale times rank.
    tuning.lora.dropout = 0.0  # Share of dropped rows of A.
    tuning.lora.patterns = ("*/w",)  # Matrices; or else convolutions.
    # Tensors, with `in`, `out` or `each` an axis: (("*/query_w", "in out out"),).
    tuning.lora.axes = ()
    return tuning


def _default_optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    optimizer.name = "adamw"  # Or sgd, lion, adafactor, muon: most of optax's.
    optimizer.learning_rate = 1e-3  # The highest value of the schedule.
    optimizer.schedule = "cosine"  # After the warm-up; or linear, constant, wsd.
    optimizer.warmup_steps = 0  # Linear, from 0.
    optimizer.final_fraction = 0.0  # Of learning_rate, at the end; not of constant.
    optimizer.weight_decay = 0.0  # Of matrices, not of norms and biases.
    optimizer.clip_norm = config_dict.placeholder(float)  # Global norm.
    optimizer.b1 = config_dict.placeholder(float)  # adamw, lion.
    optimizer.b2 = config_dict.placeholder(float)  # adamw, lion.
    optimizer.mu_dtype = config_dict.placeholder(str)  # First moments: bfloat16.
    optimizer.shard_moments = False  # sharding (("opt_state/*", "data"),): ZeRO-1.
    optimizer.momentum = config_dict.placeholder(float)  # sgd (0.9), adafactor.
    optimizer.nesterov = config_dict.placeholder(bool)  # sgd.
    return optimizer


def to_dict(config: ConfigDict) -> dict[str, Any]:
    """Converts a config to JSON types; `ConfigError` names a key that cannot be."""
    values = config.to_dict()
    try:
        return parse(json.dumps(values), dict)
    except TypeError:
        _check_saveable(values)
        raise


def _check_saveable(values: dict[str, Any]) -> None:
    for key, value in flatten(values).items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"config.{key} is a {type(value).__name__}, which cannot be saved; "
                "possible are numbers, strings, booleans, None and tuples of them"
            ) from error


def load(path: Path) -> ConfigDict:
    """Reads a saved config, or raises `ConfigError` if it is missing or damaged."""
    try:
        return ConfigDict(with_tuples(completed(read_json(path))))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path.parent} is not the workdir of a run: it has no {path.name}"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def keys_of(section: ConfigDict) -> dict[str, Any]:
    """Keys of a part of a config, with tuples for lists, as it is when it is read."""
    return with_tuples(section.to_dict())


def with_tuples(value: Any) -> Any:
    """Makes tuples of lists at any depth, which JSON has for them."""
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def of_run(workdir: Path, trust: Iterable[str] = ()) -> ConfigDict:
    """Reads and checks the config of a run, and where the code lies that it names.

    `trust` as in `trust.check_files`. Raises `ConfigError` without a config, or for
    code that is not trusted.
    """
    if not (saved := load(workdir / "config.json")):
        raise ConfigError(
            f"the run in {workdir} was made by a script, without a config; give "
            "--experiment=module:function, a function of the devices that makes its "
            "Experiment"
        )
    if "model_type" in saved:
        raise ConfigError(
            f"{workdir} is a folder of Hugging Face's and not the workdir of a run"
            + EXPORTED
        )
    check(saved)
    names = code_names(saved).items()
    files = [x for key, name in names for x in check_files(key, name, workdir, trust)]
    if files:
        names = ", ".join(dict.fromkeys(map(str, files)))
        warn_once("%s names code, which is run: %s", workdir, names)
    return saved


def code_names(saved: ConfigDict) -> dict[str, str]:
    """Names of code that opening a run imports, by key; training imports more."""
    values = flatten(saved.to_dict())
    keys = [*(f"{key}.name" for key in (*NAMED, "optimizer")), "optimizer.schedule"]
    names = {key: str(values.get(key)) for key in keys}
    names = {key: name for key, name in names.items() if ":" in name}
    return names | ({} if saved.step is None else {"step": saved.step})


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """Adds keys that came later to a saved config, and drops those that are retired."""
    # Why: docs/decisions/storage.md#completed-configs
    return _merged(to_dict(default_config()), values, "config") if values else values


def _merged(defaults: dict[str, Any], values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{name}={values!r}; it must have its own keys")
    nested = {
        key: _merged(default, values[key], f"{name}.{key}")
        for key, default in defaults.items()
        if isinstance(default, dict) and key in values
    }
    merged = defaults | values | nested
    return {k: v for k, v in merged.items() if f"{name}.{k}" not in RETIRED}


def check(config: ConfigDict) -> None:
    """Checks keys, types, ranges and names without JAX; raises `ConfigError`."""
    _check_text(config, "config")
    _check_keys(config, default_config(), "")
    for key, names in NAMED.items():
        if config[key].name not in names:
            check_name(key, config[key].name, names)
    check_some(flatten(config.to_dict()))


def _check_text(value: Any, name: str) -> None:
    """Raises `ConfigError` for a key of a dictionary, at any depth, that is no text."""
    is_dict = isinstance(value, ConfigDict | dict)
    try:
        "".join(value if is_dict else ())  # A config sorts its keys first.
    except TypeError as error:
        raise ConfigError(f"{name} has a key that is no text, as JSON's are") from error
    rows = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in value.items() if is_dict else rows:
        _check_text(item, f"{name}.{key}")


def check_some(values: dict[str, Any]) -> None:
    """Raises `ConfigError` for a key's value out of its range; None is in each."""
    defaults = flatten(default_config().to_dict())
    for keys, possible, text in RANGES:
        for key in keys.split():
            value, none = values.get(key), "None, or " * (defaults[key] is None)
            with contextlib.suppress(TypeError, ValueError):  # A script's, of any type.
                if value in (None, defaults[key]) or possible(value):
                    continue
            raise ConfigError(f"config.{key}={value}; possible is {none}{text}")
    if values.get("profile") is not None:
        _check_interval(values["profile"], values.get("num_steps", 2**31))


def _check_keys(config: ConfigDict, expected: ConfigDict, prefix: str) -> None:
    # The optimizer's own keys are free; those left out are defaults.
    free = prefix == "optimizer."
    for key in config:
        if key not in expected:
            _check_unknown(prefix, key, expected, free)
    for key, default in expected.items():
        name = f"{prefix}{key}"
        if key not in config:
            if not free and name != "early_stop.min_delta":  # It came later.
                raise _no_key(name, "; start from default_config()")
        elif not isinstance(default, ConfigDict):
            value, kind = config[key], expected.get_type(key)
            is_kind = isinstance(value, (int, float) if kind is float else kind)
            fits = is_kind and isinstance(value, bool) == (kind is bool)
            if not fits and (value is not None or default is not None):
                raise _wrong_type(name, value, kind, default)
        elif not isinstance(config[key], ConfigDict):
            raise ConfigError(f"config.{name} must have a name and its own keys")
        elif name not in NAMED:
            _check_keys(config[key], default, f"{name}.")
        elif "name" not in config[key]:
            raise _no_key(f"{name}.name")


def _no_key(name: str, advice: str = "") -> ConfigError:
    return ConfigError(f"the config has no key {name}{advice}")


def _wrong_type(name: str, value: Any, kind: type, default: Any) -> ConfigError:
    possible = f"{TYPES[kind]}{' or None' * (default is None)}"
    return ConfigError(
        f"config.{name}={value!r} has the wrong type; possible is {possible}"
    )


def _check_unknown(prefix: str, key: str, keys: Iterable[str], free: bool) -> None:
    """Raises `ConfigError` for an unknown key; for a `free` one if it is misspelled."""
    guess = near(key, keys, MEANT, 0.8 if free else 0.6)
    if not prefix and key in ALIASES:
        guess = MEANT.format(f"--config.{ALIASES[key]}")
    if guess or not free:
        raise ConfigError(
            f"the config has an unknown key {prefix}{key}{guess}; possible are "
            f"{', '.join(sorted(keys))}"
        )


def interval(text: str, num_steps: int) -> tuple[int, int]:
    """Reads `START:STOP`, the steps after START up to STOP, or raises `ConfigError`."""
    start, _, stop = text.partition(":")
    if start.isdecimal() and stop.isdecimal() and int(start) < int(stop) <= num_steps:
        return int(start), int(stop)
    raise ConfigError(
        f"--profile={text} is no interval; possible is START:STOP with 0 <= START < "
        f"STOP <= {num_steps}, such as 10:20 for the ten steps after the tenth"
    )


def _check_interval(interval: Any, num_steps: int) -> None:
    with contextlib.suppress(TypeError, ValueError):
        start, stop = interval
        if 0 <= start < stop <= num_steps:
            return
    possible = f"(START, STOP) with 0 <= START < STOP <= {num_steps}"
    raise ConfigError(f"profile={interval}; possible is {possible}")


def replayed_steps(text: str) -> Callable[[int], bool]:
    """Reads `first:8,every:1000`, or raises `ConfigError`: tests a step, from 1."""
    check_some({"sdc_replay": text})
    numbers = {k: int(n) for k, n in (x.split(":") for x in text.split(","))}
    first, every = numbers.get("first", 0), numbers.get("every")
    return lambda step: step <= first or (every is not None and step % every == 0)


def fixed(values: dict[str, Any]) -> dict[str, Any]:
    """Flattens a saved config, without the keys that may change on resume."""
    return {
        key: value
        for key, value in flatten(values).items()
        if not {key, key.partition(".")[0]} & MAY_CHANGE
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compares two saved configs: a line for each key that differs."""
    old, new = flatten(old), flatten(new)
    keys = sorted(old.keys() | new.keys())
    pairs = [(key, old.get(key, "absent"), new.get(key, "absent")) for key in keys]
    return [
        f"{key}: {a!r} there, {b!r} now"
        for key, a, b in pairs
        if a != b and repr(a) != repr(b)  # NaN is not equal to itself.
    ]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries to dotted keys."""
    flat = {}
    for key, value in values.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


# Keys, what each may be, and the same in words. None is checked against the type alone.
RANGES = (
    (
        "num_steps batch_size accumulate_steps steps_per_call exact_elastic log_every "
        "eval_every save_every keep_last max_failed_saves max_consecutive_nonfinite "
        "early_stop.patience eval_batches",
        lambda value: 1 <= operator.index(value) < 2**31,  # A step is an int32.
        "1 or more, up to 2**31 - 1, a whole number",
    ),
    (
        "save_minutes optimizer.learning_rate optimizer.warmup_steps "
        "optimizer.final_fraction optimizer.weight_decay finetuning.lora.rank "
        "early_stop.min_delta",
        lambda value: value >= 0,
        "0 or more",
    ),
    (
        "keep_best",
        lambda value: operator.index(value) >= 0,
        "0 or more, a whole number",
    ),
    (
        "ema_decay optimizer.b1 optimizer.b2 finetuning.lora.dropout",
        lambda value: 0 <= value < 1,
        "from 0 to below 1",
    ),
    (
        "optimizer.clip_norm finetuning.lora.alpha watchdog_minutes max_minutes",
        lambda value: value > 0,
        "more than 0",
    ),
    ("num_epochs", lambda value: 0 < value < math.inf, "more than 0, and finite"),
    ("seed", lambda value: 0 <= operator.index(value) < 2**32, "0 to 2**32 - 1"),
    (
        "optimizer.mu_dtype reduce_dtype",  # Sums in float16 are infinite from 65,504.
        ("bfloat16", "float32").__contains__,
        "bfloat16 or float32",
    ),
    (
        "sdc_replay",
        REPLAYED.fullmatch,
        "text such as 'first:8,every:1000', 'first:8' or 'every:1000', of steps",
    ),
    ("best_mode early_stop.mode", ("min", "max").__contains__, "min or max"),
    (
        "finetuning.train finetuning.fresh finetuning.ignore finetuning.lora.patterns "
        "finetuning.unquantized",
        lambda value: all(isinstance(item, str) for item in value),
        "a tuple of patterns, such as ('*/head/*',)",
    ),
    (
        "finetuning.rename finetuning.lora.axes",
        lambda value: all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(isinstance(item, str) for item in pair)
            for pair in value
        ),
        "a tuple of pairs of text, such as (('old/*', 'new/*'),) of patterns",
    ),
    (
        "sharding",
        lambda value: all(
            isinstance(rule, tuple)
            and len(rule) in (2, 3)
            and isinstance(rule[0], str)
            and rule[1] in ("data", None)
            and rule[2:] in ((), ("pinned_host",))
            for rule in value
        ),
        "a tuple of rules such as (('params/embed/*', None), ('*', 'data')): patterns "
        "of paths, each with the mesh axis 'data', or None for replicated, and perhaps "
        "'pinned_host', for moments in the host's memory",
    ),
)

"""From a config to the parts of a run: the last place that sees the config."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import config_dict
from rich.console import Console

from haiku_template.config import ConfigError, to_dict
from haiku_template.data import DATASETS, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.models import FLOPS_PER_TOKEN, MODELS, Model
from haiku_template.training.budget import budget_table, check_budget
from haiku_template.training.loop import train
from haiku_template.training.optimizers import make_optimizer, make_schedule
from haiku_template.training.placement import place_data
from haiku_template.training.precision import POLICIES
from haiku_template.training.program import Program, make_program
from haiku_template.training.tally import NO_TALLY, TALLIES
from haiku_template.training.tasks import DERIVED, TASKS, Task, nothing_more
from haiku_template.training.throughput import UNKNOWN, Work
from haiku_template.training.workdir import check as check_workdir

LOOP_KEYS = (
    "num_steps",
    "log_every",
    "eval_every",
    "save_every",
    "keep_last",
    "keep_best",
    "best_metric",
    "best_mode",
)


def build(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    memory_limit: int | None = None,
) -> Program:
    """Makes the program that a config describes.

    Args:
      config: checked.
      devices: where to run.
      memory_limit: bytes that each device has; None asks JAX.

    Raises:
      ConfigError: an unknown name or key, or a value that does not fit.
      DataError: see the data set.
      PlacementError: the batch does not split over the devices.
    """
    task = _task(config.task)
    data = make_data(config)
    model = make_model(config, data.num_outputs, devices.axis_name)
    _check_vocabulary(config, data)
    values = config.optimizer.to_dict()
    keys = ("learning_rate", "warmup_steps", "final_fraction")
    try:
        schedule = make_schedule(
            values.pop("schedule"),
            num_steps=config.num_steps,
            **{key: values.pop(key) for key in keys},
        )
        optimizer = make_optimizer(values.pop("name"), schedule, **values)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.optimizer: {error}") from error
    if config.precision not in POLICIES:
        raise ConfigError(
            f"config.precision={config.precision!r}; possible are {', '.join(POLICIES)}"
        )
    program = make_program(
        devices=devices,
        model=model,
        task=task,
        data=data,
        optimizer=optimizer,
        schedule=schedule,
        precision=config.precision,
        accumulate_steps=config.accumulate_steps,
        ema_decay=config.ema_decay,
        seed=config.seed,
        derive=DERIVED.get(config.task.name, nothing_more),
        tally=TALLIES.get(config.task.name, NO_TALLY),
        work=_work(config, data),
    )
    return place_data(program, config.data.get("placement", "host"), memory_limit)


def make_data(config: config_dict.ConfigDict) -> Data:
    """The data set that a config names.

    Raises:
      ConfigError: an unknown name or key.
      DataError: see the data set.
    """
    spec = BatchSpec(config.batch_size, config.seed, config.task.name)
    values = config.data.to_dict()
    values.pop("placement", None)  # It says where the data lives, not what it is.
    return _make("data", values, DATASETS, spec)


def make_model(
    config: config_dict.ConfigDict, num_outputs: int, axis_name: str | None = None
) -> Model:
    """The model that a config names.

    Args:
      config: checked.
      num_outputs: of the data set, or of a checkpoint.
      axis_name: the mesh axis; None on one device.

    Raises:
      ConfigError: an unknown name or key, or a value that does not fit.
    """
    facts = {"num_outputs": num_outputs, "axis_name": axis_name}
    return _make("model", config.model.to_dict(), MODELS, **facts)


def _check_vocabulary(config: config_dict.ConfigDict, data: Data) -> None:
    """Asserts that an encoder has all tokens of its inputs.

    A language model gets its vocabulary from the data, as `num_outputs`.
    """
    values = config.model.to_dict()
    function = resolve("model", values["name"], MODELS)
    known = inspect.signature(function).parameters.get("vocab_size")
    size = values.get("vocab_size", known and known.default)
    if isinstance(size, int) and size < data.vocab_size:
        raise ConfigError(
            f"the data has tokens up to {data.vocab_size - 1}, and "
            f"config.model.vocab_size={size}; {data.vocab_size} or more is needed"
        )


def _work(config: config_dict.ConfigDict, data: Data) -> Work:
    if config.task.name != "language_model":
        return UNKNOWN
    batch = data.train.batch(0)
    if "loss_mask" in batch:
        return UNKNOWN  # What is learned from differs between examples.
    tokens = batch["labels"].shape[1]
    values = config.model.to_dict()
    flops = FLOPS_PER_TOKEN.get(values.pop("name"))
    if flops is None:
        return Work(tokens)
    return Work(tokens, tokens * flops(data.num_outputs, tokens, **values))


def run(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    workdir: str,
    *,
    memory_limit: int | None = None,
    profile: tuple[int, int] | None = None,
    dry_run: bool = False,
) -> None:
    """Trains what a config describes; see `build` and `train`.

    Args:
      config: checked.
      devices: where to run.
      workdir: of the run.
      memory_limit: bytes that each device has; None asks JAX.
      profile: the steps to trace: after the first number, up to the second.
      dry_run: print the memory budget and stop; nothing is written.
    """
    saved = to_dict(config)
    check_workdir(Path(workdir), saved)
    program = build(config, devices, memory_limit)
    if dry_run:
        budget = check_budget(program, memory_limit)
        Console().print(devices.describe(), budget_table(budget), sep="\n")
        return
    loop = {key: config[key] for key in LOOP_KEYS}
    how = {"memory_limit": memory_limit, "profile": profile}
    train(program, workdir=workdir, config=saved, **how, **loop)


def resolve(key: str, name: str, table: dict[str, Any]) -> Any:
    """The entry of a table, or the function that `module:function` names.

    Raises:
      ConfigError: neither; the message lists the table and the nearest name.
    """
    if name in table:
        return table[name]
    module, colon, function = str(name).partition(":")
    if not colon:
        near = difflib.get_close_matches(str(name), table, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"config.{key}.name={name!r} is not known{guess}; possible are "
            f"{', '.join(table)}, or a function of yours as module:function"
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"config.{key}.name={name!r} cannot be imported from here: {error}"
        ) from error


def _make(
    key: str, values: Any, table: dict[str, Callable], *args: Any, **kwargs: Any
) -> Any:
    """Calls what `values.name` means with the other values as keyword arguments."""
    name = values.pop("name", None)
    function = resolve(key, name, table)
    _check_keys(key, name, function, values, *args, **kwargs)
    try:
        return function(*args, **kwargs, **values)
    except ValueError as error:
        if hasattr(error, "exit_code"):
            raise
        raise ConfigError(f"config.{key}: {error}") from error


def _task(values: Any) -> Task:
    """The task, with the other keys of `config.task` as keyword arguments."""
    values = values.to_dict()
    name = values.pop("name")
    task = resolve("task", name, TASKS)
    _check_keys("task", name, task, values, None, None)
    return functools.partial(task, **values) if values else task


def _check_keys(
    key: str, name: str, function: Callable, values: dict, *args: Any, **kwargs: Any
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs, **values)
    except TypeError as error:
        given = list(signature.parameters)[len(args) :]
        takes = [parameter for parameter in given if parameter not in kwargs]
        raise ConfigError(
            f"config.{key}: {name} {error}; it takes {', '.join(takes) or 'no keys'}"
        ) from error

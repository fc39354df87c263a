"""From a config to the parts of a run: the last place that sees the config."""

import inspect
import logging
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import config_dict
from rich.console import Console

from haiku_template.config import to_dict
from haiku_template.data import DATASETS, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Tuning
from haiku_template.finetuning.source import make_source, vocabulary_of, with_sizes
from haiku_template.models import FLOPS_PER_TOKEN, MODELS, Model
from haiku_template.pretrained.reading import flatten
from haiku_template.registry import make, make_task, module, resolve, task_kind
from haiku_template.reporting.perf import UNKNOWN, Work
from haiku_template.storage.workdir import check as check_workdir
from haiku_template.training import loop
from haiku_template.training.memory import budget_table, check_budget, place_data
from haiku_template.training.optimizers import make_optimizer, make_schedule
from haiku_template.training.precision import POLICIES
from haiku_template.training.tasks import DERIVED, NO_TALLY, TALLIES, nothing_more
from haiku_template.training.trainer import Program, make_program

logger = logging.getLogger(__name__)

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
      ConfigError: see the data set.
      PlacementError: the batch does not split over the devices.
      ConfigError: see `sources.make_source`.
      ConfigError: see `make_plan`.
    """
    task, kind = make_task(config.task), task_kind(config.task.name)
    source = None
    if config.init_from is not None:
        source = make_source(config.init_from, config.model.name, devices)
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
        derive=DERIVED.get(kind, nothing_more),
        tally=TALLIES.get(kind, NO_TALLY),
        tuning=make_tuning(config),
        source=source,
        step=module("step", config.step, steps),
    )
    work = _work(config, kind, program)
    program = program._replace(work=work, parts=program.parts | {"work": work})
    return place_data(program, config.data.get("placement", "host"), memory_limit)


def make_data(config: config_dict.ConfigDict) -> Data:
    """The data set that a config names.

    Raises:
      ConfigError: an unknown name or key.
      ConfigError: see the data set.
    """
    task = task_kind(config.task.name) or config.task.name
    spec = BatchSpec(config.batch_size, config.seed, task)
    values = config.data.to_dict()
    values.pop("placement", None)  # It says where the data lives, not what it is.
    if "vocab_size" in values and values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_of(config.init_from)
    name, data = values["name"], make("data", values, DATASETS, spec)
    if not isinstance(data, Data):
        raise ConfigError(
            f"config.data: {name} returned a {type(data).__name__}; it must return a "
            "haiku_template.data.Data, which from_split makes of arrays"
        )
    return data


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
    return make("model", model_keys(config), MODELS, **facts)


def make_tuning(config: config_dict.ConfigDict) -> Tuning:
    """What trains, as a config says it."""
    values = config.finetuning.to_dict()
    lora = values.pop("lora")
    return Tuning(lora=None if lora["rank"] is None else Lora(**lora), **values)


def model_keys(config: config_dict.ConfigDict) -> dict[str, Any]:
    """The keys of `config.model`, with the sizes of the model that it starts from."""
    return with_sizes(config.model.to_dict(), config.init_from)


def _check_vocabulary(config: config_dict.ConfigDict, data: Data) -> None:
    """Asserts that an encoder has all tokens of its inputs.

    A language model gets its vocabulary from the data, as `num_outputs`.
    """
    values = model_keys(config)
    function = resolve("model", values["name"], MODELS)
    known = inspect.signature(function).parameters.get("vocab_size")
    size = values.get("vocab_size", known and known.default)
    if isinstance(size, int) and size < data.vocab_size:
        raise ConfigError(
            f"the data has tokens up to {data.vocab_size - 1}, and "
            f"config.model.vocab_size={size}; {data.vocab_size} or more is needed"
        )


def _work(config: config_dict.ConfigDict, kind: str | None, program: Program) -> Work:
    if kind != "language_model":
        return UNKNOWN
    data, plan = program.data, program.start.plan
    batch = data.train.batch(0)
    labels = batch.get("labels")
    if "loss_mask" in batch or np.ndim(labels) != 2:
        return UNKNOWN  # What is learned from differs between examples.
    tokens = labels.shape[1]
    values = model_keys(config)
    flops = FLOPS_PER_TOKEN.get(values.pop("name"))
    if flops is None:
        return Work(tokens)
    if plan.frozen:
        params = flatten(program.devices.abstract(program.init).params)
        learned = {path: leaf.size for path, leaf in params.items()}
        values["trained"] = {k: n for k, n in learned.items() if k in plan.trained}
        # Adapters are where the matrices are that they belong to.
        values["added"] = {k: n for k, n in learned.items() if k not in plan.trained}
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
    if config.finetuning.fresh and config.init_from is None:
        raise ConfigError(
            "--config.init_from is needed, a workdir, a Hugging Face folder or a "
            "safetensors file: config.finetuning.fresh says what is not read from it"
        )
    program = build(config, devices, memory_limit)
    if program.start.plan.frozen and not program.start.read:
        logger.warning(
            "what is frozen was never trained: config.init_from is None, so that it "
            "comes from the seed"
        )
    if dry_run:
        budget = check_budget(program, memory_limit)
        Console(markup=False).print(devices.describe(), budget_table(budget), sep="\n")
        return
    keys = {key: config[key] for key in LOOP_KEYS}
    how = {"memory_limit": memory_limit, "profile": profile}
    train = module("loop", config.loop, loop).train
    train(program, workdir=workdir, config=saved, **how, **keys)

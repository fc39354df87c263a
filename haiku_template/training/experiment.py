"""Experiments: the parts of a run; here alone they are made from a config."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import optax
from ml_collections import ConfigDict

from haiku_template import compat
from haiku_template import finetuning as tuning
from haiku_template.config import (
    check,
    check_some,
    code_names,
    default_config,
    keys_of,
    to_dict,
)
from haiku_template.data import DATASETS, BatchSpec, Data, by_name, described
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, some
from haiku_template.models import MODELS, Family, Model, check_vocabulary
from haiku_template.models.forms import FORMS, in_form, own_keys
from haiku_template.registry import check_keys, make, resolve, users_module
from haiku_template.training import step
from haiku_template.training.optimizers import Schedule, make_optimization
from haiku_template.training.tasks import FACTS, TASKS, Task, as_task, facts_of
from haiku_template.training.trainer import Trainer
from haiku_template.trust import check_definition

PLACEMENTS = ("host", "device", "auto")
# Fields that do not change what an experiment computes.
PLACED = {"placement", "why_on_host", "described", "sharding"}
PLACED |= {"steps_per_call", "skips"}
STEP = ("forward", "make_gradients", "make_update")  # Of a module of `config.step`.
# Keys of a config that are fields of an experiment.
SAME = ("precision", "reduce_dtype", "accumulate_steps", "ema_decay", "seed")
SAME += ("steps_per_call", "exact_elastic")
SHARDED_MOMENTS = ("opt_state/*", "data")  # ZeRO-1.


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Experiment:
    """The parts of a run, made from a config or by a script.

    Raises `ConfigError` if a part is missing or out of range, or two disagree.

    Attributes:
      model: a transformed `forward(inputs, is_training)`, with or without state.
      task: a `Task`, or only its function, as of (outputs, batch).
      schedule: reported as the learning rate; None reports none.
      reduce_dtype: dtype of the gradients' all-reduce; None for their own.
      accumulate_steps: micro-batches of gradient accumulation.
      steps_per_call: steps in one call of the devices; None for `train` to choose.
      exact_elastic: logical shares of a batch, in whose order all sums are made: each
        number of devices that divides it computes the same bits; None for none.
      skips: a step of a run whose loss, gradient norm or network state is not finite
        leaves the state as it was; `train` sets it.
      ema_decay: decay of the averaged parameters, which evaluation uses; None for none.
      seed: of the initial parameters and of dropout.
      sharding: rules of the train state's `Layout`; () for replicated.
      placement: of the training data: `host`; `device` to stage the whole set once on
        each device, so that steps copy none of it; `auto` to do so if it fits beside
        the model. `why_on_host` is the reason where `auto` chose the host.
      flops_per_token: maps (num_tokens, trained, added) to the operations of a training
        step for each token; `trained` and `added` are sizes by path of trainable
        parameters and adapters, as in `gpt_flops_per_token`. None if not known.
      family: of the model, for exporting and generating text; None without one.
      init_from: source of pretrained parameters, on resume of frozen ones; or None.
      steps: module with the functions of `training.step`, to change its mathematics.
      init: custom first state, `init(rng, batch)` to a dictionary of `params`,
        `net_state`, `opt_state` or `ema_params`, any pytrees; None for the model's.
      step: custom train step, `step(state, batch, rng, axis_name)` to the new state and
        scalars; it averages over `axis_name` itself (None on one device). Model, task
        and optimizer may be None then.
    """

    data: Data
    model: Model | None = None
    task: Task | Callable[..., Any] | None = None
    optimizer: optax.GradientTransformation | None = None
    schedule: Schedule | None = None
    precision: str = "float32"
    reduce_dtype: str | None = None
    accumulate_steps: int = 1
    steps_per_call: int | None = None
    exact_elastic: int | None = None
    skips: bool = False
    ema_decay: float | None = None
    seed: int = 0
    sharding: tuple[tuple[str, str], ...] = ()
    placement: str = "host"
    why_on_host: str = ""
    flops_per_token: Callable[..., float] | None = None
    family: Family | None = None
    finetuning: tuning.Finetuning = tuning.Finetuning()
    init_from: tuning.Source | None = None
    steps: ModuleType = step  # The module; the field `step` below hides its name.
    init: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    # Of `from_config`: the saved config, and the experiment that it describes.
    described: tuple[dict[str, Any], "Experiment"] | None = None

    def __post_init__(self) -> None:
        check_some(vars(self))
        if self.placement not in PLACEMENTS:
            raise _no_placement(self.placement)
        fits = isinstance(self.data, Data) and hasattr(self.data.train, "batch")
        held_out = getattr(self.data, "evaluation", None)
        fits = fits and (held_out is None or hasattr(held_out, "num_batches"))
        fits = fits and (self.optimizer is None or hasattr(self.optimizer, "init"))
        functions = filter(None, (self.schedule, self.init_from))
        if self.init or self.step or not all(map(callable, functions)):
            _check_functions(self)
        if not fits:
            _refuse_parts(self.data, self.optimizer)
        needs = {"model", "task", "optimizer"} if self.step is None else set()
        needs |= {"model"} if self.init is None else set()
        sets = self.data.evaluation is not None or self.data.evaluations
        needs |= {"task"} if sets else set()
        if lacks := sorted(name for name in needs if getattr(self, name) is None):
            raise _incomplete(lacks)
        if self.data.evaluations:
            _check_evaluations(self.data)
        if self.data.class_names:
            _check_classes(self.data.class_names, self.data.num_outputs)

    @classmethod
    def from_config(cls, config: ConfigDict, devices: DeviceManager) -> "Experiment":
        """Makes the experiment that a config describes; nothing is compiled.

        Raises `ConfigError` for unknown names and keys, and values that do not fit.
        """
        check(config)
        if config.compat:
            compat.install()
        task = make_task(config)
        values = default_config().optimizer.to_dict() | keys_of(config.optimizer)
        optimizer, schedule = make_optimization(config.num_steps, **values)
        function = resolve("model", config.model.name, MODELS)
        family = getattr(function, "family", None)
        finetuning, source = tuning.Finetuning(), None
        tuned = config.finetuning != default_config().finetuning
        if tuned or config.init_from is not None:
            finetuning = tuning.make_finetuning(config.init_from, **config.finetuning)
            source = tuning.open_source(config.init_from, family, devices, finetuning)
        data = make_data(config, *devices.processes[:2])
        keys = model_keys(config)
        del keys["name"]
        if data.vocab_size:
            check_vocabulary(function, data.vocab_size, keys.get("vocab_size"))
        moments = (SHARDED_MOMENTS,) if config.optimizer.get("shard_moments") else ()
        flops = family and family.flops_per_token
        flops = flops and functools.partial(flops, data.num_outputs, **keys)
        experiment = cls(
            model=make_model(config, data.num_outputs, devices.axis_name),
            task=task,
            data=data,
            optimizer=optimizer,
            schedule=schedule,
            # The rule of `shard_moments` before others.
            sharding=(*moments, *map(tuple, config.sharding)),
            placement=config.data.get("placement", "host"),
            skips=config.max_consecutive_nonfinite > 1,
            **{key: config[key] for key in SAME},
            family=family,
            flops_per_token=flops,
            finetuning=finetuning,
            init_from=source,
            steps=step
            if config.step is None
            else users_module("step", config.step, *STEP),
        )
        return dataclasses.replace(experiment, described=(to_dict(config), experiment))

    def __repr__(self) -> str:  # Parts that are not the default, without arrays.
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        del fields["described"]
        values = {k: getattr(self, k) for k in fields}
        changed = {k: x for k, x in values.items() if x is not fields[k] and x != ()}
        texts = [
            f"{k}={x!r}" if type(x) in (Data, tuple) else f"{k}={described(x)}"
            for k, x in changed.items()
        ]
        return f"Experiment({', '.join(texts)})"

    @property
    def config(self) -> dict[str, Any]:
        """Config of `from_config`; {} once a script has replaced a part."""
        config, original = self.described or ({}, self)
        names = {field.name for field in dataclasses.fields(self)} - PLACED
        # Why: docs/decisions/models.md#replaced-parts
        same = all(getattr(self, x) is getattr(original, x) for x in names)
        return config if same else {}

    @property
    def devices(self) -> DeviceManager:
        """A trainer's: raises `ConfigError`, as of `train(experiment)`."""
        raise ConfigError(
            "an Experiment was given where its trainer is needed, which knows the "
            "devices: train(experiment.trainer(devices), ...), with devices = "
            "DeviceManager.create()"
        )

    def trainer(self, devices: DeviceManager) -> Trainer:
        """Makes the trainer, which compiles the experiment for these devices."""
        return Trainer(self, devices)


def _incomplete(names: list[str]) -> ConfigError:
    return ConfigError(
        f"the experiment has no {', no '.join(names)}; with a custom init and step it "
        "needs neither model nor optimizer, and without an evaluation set no task"
    )


def _no_placement(placement: str) -> ConfigError:
    return ConfigError(
        f"config.data.placement={placement!r}; possible are {', '.join(PLACEMENTS)}"
    )


def _check_classes(names: Sequence[str], count: int) -> None:
    if count and len(names) != count:
        raise ConfigError(
            f"data.class_names has {len(names)} names, {some(names, 8)}, and "
            f"data.num_outputs is {count}"
        )


def _check_functions(experiment: Experiment) -> None:
    for name in ("schedule", "init_from", "init", "step"):
        part = getattr(experiment, name)
        if part is not None and not callable(part):
            raise ConfigError(f"Experiment({name}={part!r:.60}) is no function")
    is_tuned = experiment.finetuning != tuning.Finetuning()
    if experiment.init and (experiment.init_from or is_tuned):
        raise ConfigError(
            "init makes the whole first state; init_from and finetuning are for "
            "the parameters of a model"
        )
    of_update = {
        "accumulate_steps": experiment.accumulate_steps > 1,
        "reduce_dtype": experiment.reduce_dtype is not None,
        "precision='float16'": experiment.precision == "float16",
    }
    names = [name for name, is_set in of_update.items() if is_set]
    if experiment.step and names:
        raise ConfigError(
            f"{', '.join(names)} would do nothing: step makes the whole update, its "
            "average over the devices and its loss scale"
        )


def _refuse_parts(data: Any, optimizer: Any) -> None:
    if optimizer is not None and not hasattr(optimizer, "init"):
        raise ConfigError(
            f"Experiment(optimizer={optimizer!r:.60}) is none; it is what optax "
            "returns, such as optax.adam(1e-3), and names are for configs"
        )
    if isinstance(data, Data):
        name, need = "evaluation", "num_batches, and batch(index)"
        if not hasattr(data.train, "batch"):
            name, need = "train", "batch(step)"
        kind = type(getattr(data, name)).__name__
        raise ConfigError(f"data.{name} is a {kind}; it needs {need}: a batch of it")
    advice = "from_split, or Data(train, evaluation, num_outputs) of your own sets"
    if hasattr(data, "x_train"):
        advice = "from_split(split, BatchSpec(batch_size))"
    raise ConfigError(
        f"Experiment(data=...) is a {type(data).__name__}, and Data is needed; of "
        f"haiku_template.data it is {advice}"
    )


def _check_evaluations(data: Data) -> None:
    if data.evaluation is None:
        raise ConfigError("data.evaluations come after data.evaluation, which is None")
    names = data.evaluations if isinstance(data.evaluations, Mapping) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"data.evaluations={data.evaluations!r:.80}; possible is a dictionary of "
            "evaluation sets by name, such as {'unseen': a set}"
        )


def make_task(config: ConfigDict) -> Task:
    """Makes `config.task`, its other keys bound as keyword arguments."""
    values = keys_of(config.task)
    name = values.pop("name")
    task = as_task(resolve("task", name, TASKS))
    facts = facts_of(task.values, values.keys() - FACTS)
    check_keys("task", name, task.values, values, **dict.fromkeys(facts))
    bound = functools.partial(task.values, **values) if values else task.values
    return task._replace(values=bound)


def make_data(config: ConfigDict, *process: int) -> Data:
    """Makes `config.data`, or raises `ConfigError` if its files cannot be read."""
    spec = BatchSpec(config.batch_size, config.seed, make_task(config).labels, *process)
    values = keys_of(config.data)
    if "vocab_size" in values and values["vocab_size"] is None:
        values["vocab_size"] = tuning.vocabulary_of(config.init_from)
    if values.get("workers"):
        return _in_workers(values, spec)
    return by_name(values, spec)


def _in_workers(values: dict[str, Any], spec: BatchSpec) -> Data:
    from haiku_template.data.workers import in_workers

    if values.get("placement") == "device":
        raise ConfigError(
            f"config.data.workers={values['workers']} makes batches on the host, and "
            "with data.placement=device they are gathered on the devices; set one of "
            "the two"
        )
    return in_workers(values["workers"], by_name, values, spec)


def make_model(
    config: ConfigDict, num_outputs: int, axis_name: str | None = None
) -> Model:
    """Makes `config.model`; `num_outputs` is the data's, or a checkpoint's."""
    keys = model_keys(config)
    axis_name = None if config.exact_elastic else axis_name
    model = make("model", keys, MODELS, num_outputs=num_outputs, axis_name=axis_name)
    values = keys_of(config.model)
    return in_form(model, values) if FORMS & values.keys() else model


def family_of(model: str) -> Family | None:
    """Looks up the family of a model function; None without one."""
    return getattr(resolve("model", model, MODELS), "family", None)


def model_keys(config: ConfigDict) -> dict[str, Any]:
    """Keys of `config.model`, sizes taken from the pretrained model if there is one."""
    keys, init_from = own_keys(keys_of(config.model)), config.init_from
    if init_from is None:
        return keys
    return tuning.with_sizes(keys, init_from, family_of(config.model.name))


def check_code(config: ConfigDict, trust: Sequence[str] = ()) -> None:
    """Imports the functions that a run's config names, and checks who wrote them.

    Of a config that `config.of_run` read. Raises `ConfigError` as `check_definition`.
    """
    tables = {"model.name": MODELS, "data.name": DATASETS, "task.name": TASKS}
    for key, name in code_names(config).items():
        if ":" in name:
            table = tables.get(key, {})
            function = resolve(key, name, {})
            check_definition(key, name, function, table.values(), trust)

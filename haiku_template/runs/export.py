"""A checkpoint as safetensors, in the names that other software reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import haiku as hk
import numpy as np
from ml_collections import config_dict

from haiku_template.config import to_dict
from haiku_template.data import Data
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.finetuning.adapters import ADAPTERS, save_adapters
from haiku_template.finetuning.source import STATE, is_folder
from haiku_template.models.gpt import PRESETS
from haiku_template.pretrained.families import FAMILIES
from haiku_template.pretrained.folder import CONFIG, to_config
from haiku_template.pretrained.reading import flatten
from haiku_template.pretrained.writing import (
    Shard,
    check_new,
    export_like,
    export_new,
    new_folder,
    to_json,
    write_folder,
)
from haiku_template.runs.run import restore_run
from haiku_template.training.evaluation import variables
from haiku_template.training.experiment import model_keys
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Program

SINGLE = "model.safetensors"
HEAD = "bert/head"  # Of a classifier; sentence encoders have none.


def export_safetensors(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    workdir: Path,
    which: str,
    output: Path,
) -> int:
    """Writes parameters: the averaged ones where there are any, adapters merged.

    Models that Hugging Face knows get its names and a config.json of its kind; where
    the run began with such a folder, its other files too. Others get Haiku's names,
    `module/name`, and network state goes into state.safetensors.

    Args:
      config: as saved in the workdir.
      devices: any; the run may have used others.
      workdir: of the run.
      which: `latest`, `best`, or a step.
      output: the folder to write.

    Returns:
      The step of the checkpoint.

    Raises:
      ConfigError: `output` exists, or the base is not that of the run.
      StorageError: it cannot be written.
      ConfigError: no such checkpoint, or a classifier that transformers would load
        and compute something else from.
      StorageError: it is damaged.
    """
    check_new(output)
    program, step, state = restore_run(config, devices, workdir, which)
    params, net_state = whole_model(program, state)
    kinds = [k for k, family in FAMILIES.items() if family.model == config.model.name]
    if not kinds:
        trees = {SINGLE: params} | ({STATE: net_state} if net_state else {})
        shards = {name: Shard({}, _makers(devices, t)) for name, t in trees.items()}
        others = {CONFIG: to_json(to_dict(config))}
        write_folder(output, shards, others, SINGLE, {})
        return step
    rules, source = FAMILIES[kinds[0]].rules, config.init_from
    described = _classes(config, program.data) if HEAD in params else {}
    if is_folder(source):
        export_like(source, output, params, rules, devices, config=described or None)
        return step
    arguments = {"num_outputs": program.data.num_outputs} | model_keys(config)
    if config.model.name == "gpt":
        sizes = PRESETS[arguments.get("preset") or "124M"]._asdict()
        arguments = sizes | {k: v for k, v in arguments.items() if v is not None}
    made = to_config(kinds[0], arguments) | described
    export_new(output, params, rules, devices, config=made)
    return step


def export_adapters(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    workdir: Path,
    which: str,
    output: Path,
) -> int:
    """Writes what trained, and the hash of the base that it belongs to.

    Evaluation, generation and export take the folder as a workdir, and training goes on
    from `config.finetuning.adapters`; both need the base where the run found it, or
    where init_from in config.json now says.
    Arguments and result are those of `export_safetensors`, and so are errors, besides:

    Raises:
      ConfigError: what trained is not parameters alone, on a frozen base that was read.
    """
    check_new(output)
    program, step, state = restore_run(config, devices, workdir, which)
    plan, (params, net_state) = program.start.plan, variables(state)
    if net_state or not plan.frozen:
        found = "network state besides parameters" if plan.frozen else "a whole model"
        raise ConfigError(
            f"the run in {workdir} trained {found}, and --format=adapters is for what "
            "trained on a frozen base; --format=safetensors writes all of it"
        )
    if not program.start.read:
        raise ConfigError(
            f"the base of the run in {workdir} comes from its seed, which gives other "
            "last bits on other devices, so that no hash can tell it; "
            "--format=safetensors writes all of the model"
        )
    base = program.start.base.arrays()
    with new_folder(output) as folder:
        save_adapters(folder / ADAPTERS, params, base, plan.lora, devices, step=step)
        (folder / CONFIG).write_bytes(to_json(to_dict(config)))
    return step


def whole_model(program: Program, state: TrainState) -> tuple[hk.Params, hk.State]:
    """The parameters and state to use: averaged where they are, adapters merged."""
    params, net_state = variables(state)
    start = program.start
    if start.plan.frozen:
        base = start.base.arrays()
        params = program.devices.init(start.plan.merge, params, base)
    return params, net_state


def _makers(devices: DeviceManager, tree: Any) -> dict[str, Callable[[], np.ndarray]]:
    """What copies each leaf to the host, by path."""
    return {
        path: lambda leaf=leaf: np.asarray(devices.fetch(leaf), order="C")
        for path, leaf in flatten(tree).items()
    }


def _classes(config: config_dict.ConfigDict, data: Data) -> dict[str, Any]:
    """What Hugging Face's config.json says of a classifier.

    Raises:
      ConfigError: Hugging Face has no such classifier.
    """
    pooling = model_keys(config).get("pooling", "cls")
    if pooling != "cls":
        raise ConfigError(
            f"config.model.pooling={pooling}, and Hugging Face's classifiers know cls "
            "alone: transformers would load the folder and compute something else; "
            "train with --config.model.pooling=cls, or export this run with "
            "--format=stablehlo"
        )
    names = data.class_names or tuple(map(str, range(data.num_outputs)))
    return {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }

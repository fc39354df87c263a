"""A checkpoint as safetensors, in the names that other software reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.config import to_dict
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.finetuning import ADAPTERS, STATE, is_folder, save_adapters
from haiku_template.params import flatten
from haiku_template.pretrained import (
    CONFIG,
    Shard,
    check_new,
    export_like,
    export_new,
    new_folder,
    to_config,
    to_json,
    write_folder,
)
from haiku_template.runs.run import Run
from haiku_template.training.experiment import family_of, model_keys

SINGLE = "model.safetensors"
HEAD = "bert/head"  # Of a classifier; sentence encoders have none.


def export_safetensors(run: Run, output: Path) -> int:
    """Writes parameters: the averaged ones where there are any, adapters merged.

    Models that Hugging Face knows get its names and a config.json of its kind; where
    the run began with such a folder, its other files too. Others get Haiku's names,
    `module/name`, and network state goes into state.safetensors.

    Args:
      run: with its checkpoint.
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
    config, devices, data = run.config, run.devices, run.trainer.experiment.data
    params, net_state = run.model()
    family = family_of(config.model.name)
    if family is None:
        trees = {SINGLE: params} | ({STATE: net_state} if net_state else {})
        shards = {name: Shard({}, _makers(devices, t)) for name, t in trees.items()}
        others = {CONFIG: to_json(to_dict(config))}
        write_folder(output, shards, others, SINGLE, {})
        return run.step
    rules, source = family.rules, config.init_from
    described = _classes(run) if HEAD in params else {}
    if is_folder(source):
        export_like(source, output, params, rules, devices, config=described or None)
        return run.step
    arguments = {"num_outputs": data.num_outputs} | model_keys(config)
    made = to_config(family, family.sizes(arguments)) | described
    export_new(output, params, rules, devices, config=made)
    return run.step


def export_adapters(run: Run, output: Path) -> int:
    """Writes what trained, and the hash of the base that it belongs to.

    Evaluation, generation and export take the folder as a workdir, and training goes on
    from `config.finetuning.adapters`; both need the base where the run found it, or
    where init_from in config.json now says.
    Arguments and result are those of `export_safetensors`, and so are errors, besides:

    Raises:
      ConfigError: what trained is not parameters alone, on a frozen base that was read.
    """
    check_new(output)
    plan, state = run.trainer.plan, run.state
    if state.net_state or not plan.frozen:
        found = "network state besides parameters" if plan.frozen else "a whole model"
        raise ConfigError(
            f"the run in {run.workdir} trained {found}, and --format=adapters is for "
            "adapters of frozen parameters; --format=safetensors writes all of it"
        )
    if run.config.init_from is None:
        raise ConfigError(
            f"the frozen parameters of the run in {run.workdir} come from its seed, "
            "which gives other last bits on other devices, so that no hash can tell "
            "them; --format=safetensors writes all of the model"
        )
    with new_folder(output) as folder:
        trees = state.averaged(), state.frozen
        where = plan.lora, run.devices
        save_adapters(folder / ADAPTERS, *trees, *where, step=run.step)
        (folder / CONFIG).write_bytes(to_json(to_dict(run.config)))
    return run.step


def _makers(devices: DeviceManager, tree: Any) -> dict[str, Callable[[], np.ndarray]]:
    """What copies each leaf to the host, by path."""
    return {
        path: lambda leaf=leaf: np.asarray(devices.fetch(leaf), order="C")
        for path, leaf in flatten(tree).items()
    }


def _classes(run: Run) -> dict[str, Any]:
    """Keys of Hugging Face's config.json for a classifier.

    Raises:
      ConfigError: Hugging Face has no such classifier.
    """
    pooling = model_keys(run.config).get("pooling", "cls")
    if pooling != "cls":
        raise ConfigError(
            f"config.model.pooling={pooling}, and Hugging Face's classifiers know cls "
            "alone: transformers would load the folder and compute something else; "
            "train with --config.model.pooling=cls, or export this run with "
            "--format=stablehlo"
        )
    data = run.trainer.experiment.data
    names = data.class_names or tuple(map(str, range(data.num_outputs)))
    return {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }

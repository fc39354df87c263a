"""Export of a checkpoint as safetensors, in names that other software reads."""

from pathlib import Path

from haiku_template import pretrained
from haiku_template.config import to_dict
from haiku_template.errors import ConfigError
from haiku_template.finetuning import (
    ADAPTERS,
    STATE,
    check_readable,
    is_folder,
    save_adapters,
)
from haiku_template.models import HUGGING_FACE
from haiku_template.params import flatten
from haiku_template.registry import resolve
from haiku_template.runs.run import Run
from haiku_template.storage.workdir import CONFIG
from haiku_template.training.experiment import model_keys

SINGLE = "model.safetensors"


def export_safetensors(run: Run, output: Path) -> int:
    """Writes a model to a new folder, averaged and merged as in evaluation.

    Models that Hugging Face knows get its names and its config.json, and the other
    files of the folder that they started from, with the run's tokenizer. Others get
    Haiku's names, `module/name`, and state.safetensors for network state.

    Returns the step of the checkpoint. Raises `ConfigError` if `output` exists, there
    is no such checkpoint, its frozen parameters changed, or transformers would compute
    something else from the classifier; `StorageError` if the checkpoint is damaged, or
    `output` cannot be written.
    """
    pretrained.check_new(output)
    config, devices = run.config, run.devices
    params, net_state = run.parameters()
    if (family := run.family) is None or config is None:
        trees = {SINGLE: params} | ({STATE: net_state} if net_state else {})
        with pretrained.new_folder(output) as folder:
            for file, tree in trees.items():
                arrays = {k: devices.fetch(x) for k, x in flatten(tree).items()}
                pretrained.save_tensors(folder / file, arrays, None)
            if config:
                (folder / CONFIG).write_bytes(pretrained.to_json(to_dict(config)))
        return run.step
    data = run.trainer.experiment.data
    resolve("init_from", "export", HUGGING_FACE)(
        output,
        params,
        family,
        devices,
        source=config.init_from if is_folder(config.init_from) else None,
        arguments={"num_outputs": data.num_outputs} | model_keys(config),
        class_names=[*map(str, data.class_names or range(data.num_outputs or 0))],
        tokenizer=data.text,
    )
    return run.step


def export_npz(run: Run, output: Path, names: str = "haiku") -> int:
    """Writes a model to a new .npz file, as its publisher's loader reads it.

    Parameters and network state, averaged and merged as in evaluation, are named as in
    the file of config.init_from, and else as in the model, in the form `names` of
    `pretrained.archive`.

    Returns and raises as `export_safetensors`, and `ConfigError` for network state that
    these names have no place for, and if that file is gone.
    """
    if output.suffix != ".npz":
        raise ConfigError(f"--output={output} does not end in .npz")
    pretrained.check_new(output)
    if run.config is not None and run.config.init_from is not None:
        check_readable(run.config.init_from)  # Whose names they get.
    params, net_state = run.parameters()
    state = {pretrained.MARK + k: x for k, x in flatten(net_state).items()}
    source = run.trainer.experiment.init_from
    leaves = flatten(params) | state
    pretrained.export_npz(output, leaves, params, source, run.devices, names)
    return run.step


def export_adapters(run: Run, output: Path) -> int:
    """Writes trainable parameters, and the hash of the frozen ones.

    The folder is a workdir for evaluation, generation and export, and
    `config.finetuning.adapters` for training. Frozen parameters are read from init_from
    in its config.json. Returns and raises as `export_safetensors`, and `ConfigError` if
    the run has network state, or no frozen parameters that were read.
    """
    pretrained.check_new(output)
    plan, state = run.trainer.recipe.plan, run.state
    if state.net_state or not plan.frozen:
        leaves = "network state besides parameters" if plan.frozen else "a whole model"
        raise ConfigError(
            f"the run in {run.workdir} trained {leaves}, and --format=adapters is for "
            "adapters of frozen parameters; --format=safetensors writes all of it"
        )
    if run.config is None:
        raise ConfigError(
            f"the run in {run.workdir} was made by a script, without the config that a "
            "folder of adapters has; --format=safetensors writes all of the model"
        )
    if run.trainer.experiment.init_from is None:
        raise ConfigError(
            f"the frozen parameters of the run in {run.workdir} come from its seed, "
            "which gives other last bits on other devices, so that no hash can tell "
            "them; --format=safetensors writes all of the model"
        )
    with pretrained.new_folder(output) as folder:
        file, params = folder / ADAPTERS, state.averaged()
        save_adapters(file, params, state.frozen, plan.lora, run.devices, step=run.step)
        (folder / CONFIG).write_bytes(pretrained.to_json(to_dict(run.config)))
    return run.step

"""Trial of a config before its run: one batch overfitted, an evaluation, a save."""

import contextlib
import dataclasses
import functools
import io
import time
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from haiku_template import signals
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.runs.limits import with_eval_batches
from haiku_template.runs.start import in_steps, loop_of, loop_options, trainer_of
from haiku_template.storage import read
from haiku_template.storage import workdir as workdirs
from haiku_template.training import Trainer

STEPS, BATCHES = 20, 2  # On one batch, and of the evaluation set.
NO_MORE = dict.fromkeys(("eval_every", "save_every", "save_minutes", "mirror"))


def check_run(config: Any, devices: DeviceManager) -> None:
    """Trains a few steps on the first batch, evaluates, saves and resumes; prints how.

    Nothing is kept. Raises `ConfigError` for several processes or a loss that does not
    fall, and what a run does for parts that do not fit, also in memory, or not finite.
    """
    if devices.processes.count > 1:
        raise ConfigError(
            f"--check is for one process, and this is a run of "
            f"{devices.processes.count}; start one, or give --distributed=off"
        )
    begun = time.monotonic()
    if config.num_epochs is not None:
        in_steps(config, devices)  # Raises where they cannot be counted.
    config = config.copy_and_resolve_references()
    config.num_steps, config.data.placement = STEPS, "host"
    config.optimizer.warmup_steps = 0
    experiment = trainer_of(config, devices).experiment
    if experiment.data.evaluation is not None:
        experiment = with_eval_batches(experiment, BATCHES)
    batch = experiment.data.train.batch(0)
    data = experiment.data._replace(train=SimpleNamespace(batch=lambda step: batch))
    experiment = dataclasses.replace(experiment, data=data, steps_per_call=1)
    with TemporaryDirectory() as folder, signals.called(lambda *_: rmtree(folder)):
        train = functools.partial(_train, config, Path(folder) / "run")
        shown = train(experiment.trainer(devices), STEPS)
        train(experiment.trainer(devices), STEPS + 1)
        rows = read(Path(folder) / "run" / workdirs.METRICS)
    table, lines = shown.partition("Parameters")[::2]
    print(table + "Parameters" + lines.partition("workdir ")[0].rstrip())
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    fact = f"loss {losses[0]:.4g} to {losses[STEPS - 1]:.4g} in {STEPS} steps"
    if losses[STEPS - 1] >= losses[0]:
        raise ConfigError(
            f"on one batch, shown again and again, the {fact} does not fall: does it "
            "depend on the outputs, and they on the inputs? Is "
            "config.optimizer.learning_rate 0, or too large?"
        )
    measured = [row for row in rows if any(key.startswith("eval/") for key in row)]
    evaluation = "nothing to evaluate on"
    if measured:
        values = [f"{k} {x:.4g}" for k, x in measured[0].items() if k != "step"]
        evaluation = f"{', '.join(values)} on {BATCHES} batches at most"
    print(
        f"check     {fact} on one batch; {evaluation}; saved, and resumed for a step; "
        f"{time.monotonic() - begun:.0f} s"
    )


def _train(config: Any, workdir: Path, trainer: Trainer, num_steps: int) -> str:
    """Trains without a word, but in no tracker; returns what a run would have shown."""
    text, how = io.StringIO(), loop_options(config)
    how |= {"num_steps": num_steps, "log_every": 1, "writers": ()} | NO_MORE
    with contextlib.redirect_stdout(text):
        how["hooks"] = [make(trainer, workdir) for make in how["hooks"]]
        loop_of(config)(trainer, workdir=workdir, **how)
    return text.getvalue()

"""Assertions for the tests of a project: four properties of each of its runs.

They run a config on CPU devices, on a machine with GPUs too, for a few steps; each
takes an empty `workdir`. Import this module in tests alone, as `skeleton/tests` does.
"""

import atexit
import dataclasses
import functools
import runpy
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from haiku_template import config as configs
from haiku_template.devices import DeviceManager
from haiku_template.params import flatten
from haiku_template.preflight.checks import check_evaluation
from haiku_template.runs.limits import with_eval_batches
from haiku_template.runs.start import loop_of
from haiku_template.storage.metrics import read
from haiku_template.storage.workdir import METRICS
from haiku_template.training import Experiment

NUM_DEVICES = 4


def simulate_devices() -> None:
    """Makes the CPU appear as four devices; call it in conftest.py, before JAX starts.

    Tests of one process share compiled programs. Raises `DeviceError` if JAX had
    started with fewer devices.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = tempfile.mkdtemp(prefix="compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    _devices(NUM_DEVICES)


def load_config(path: str | Path) -> ConfigDict:
    """Runs `get_config()` of a Python file, and checks the config."""
    config = runpy.run_path(str(path))["get_config"]()
    configs.check(config)
    return config


def assert_builds(config: ConfigDict) -> None:
    """Asserts that the parts of a run fit: reads its data and traces both its steps.

    Nothing is compiled, and no parameter is allocated. `ConfigError` says what does not
    fit, such as a key, data that cannot be read, or a task for the model's outputs.
    """
    devices = _devices(1)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    trainer.trace(trainer.feed.host_shapes()[0]).lower()
    check_evaluation(trainer, config.best_metric)


def assert_loss_falls(config: ConfigDict, workdir: Path, num_steps: int = 20) -> None:
    """Asserts that the loss of one batch falls in `num_steps` steps on it."""
    _, rows = _train(config, workdir, num_steps, one_batch=True)
    first, *_, last = [row["train/loss"] for row in rows if "train/loss" in row]
    assert last < first, (
        f"the loss of a batch that was shown {num_steps} times went from {first:.6g} "
        f"to {last:.6g}: does it depend on the outputs, and they on the inputs? Is "
        "config.optimizer.learning_rate 0, or too large?"
    )


def assert_devices_agree(
    config: ConfigDict,
    workdir: Path,
    num_steps: int = 5,
    tolerance: float = 1e-3,  # Why: docs/decisions/projects.md#tolerance
) -> None:
    """Asserts that four devices equal one: losses and gradient norms, in float32.

    Dropout differs between devices, so its rate must be 0. `tolerance` is relative and
    absolute: sums are added in another order, which a ReLU near zero amplifies.
    """
    config = config.copy_and_resolve_references()
    config.precision = "float32"
    runs = [
        _train(config, workdir / str(count), num_steps, count=count)[1]
        for count in (1, NUM_DEVICES)
    ]
    for one, four in zip(*runs, strict=True):
        for name in one.keys() & {"train/loss", "train/grad_norm", "eval/loss"}:
            assert np.allclose(one[name], four[name], tolerance, tolerance), (
                f"{name} of step {one['step']} is {one[name]:.6g} on one device and "
                f"{four[name]:.6g} on {NUM_DEVICES}: does a layer that averages over "
                "the batch do so over axis_name (cross_replica_axis of hk.BatchNorm)? "
                "Is the rate of dropout 0?"
            )


def assert_resumes_bitwise(
    config: ConfigDict, workdir: Path, num_steps: int = 6
) -> None:
    """Asserts that a run stopped half-way and resumed ends bitwise as without the stop.

    State and metrics are compared.
    """
    state, rows = _train(config, workdir / "whole", num_steps)
    # Each is built anew, as by another process: only the checkpoint is shared.
    _train(config, workdir / "parts", num_steps, stop=num_steps // 2)
    resumed, again = _train(config, workdir / "parts", num_steps)
    advice = (
        "differs after a run that was stopped and resumed: is batch(step) a function "
        "of the step alone?"
    )
    state, resumed = flatten(state), flatten(resumed)
    for name in state:
        same = np.array_equal(state[name], resumed[name], equal_nan=True)
        assert same, f"{name} {advice}"
    for row, other in zip(rows, again, strict=True):
        for name in row:
            same = name.startswith("perf/") or row[name] == other[name]
            assert same, f"{name} of step {row['step']} {advice}"


def _devices(count: int) -> DeviceManager:
    return DeviceManager.create("cpu", num_devices=count, simulate_devices=NUM_DEVICES)


def _train(
    config: ConfigDict,
    workdir: Path,
    num_steps: int,
    stop: int | None = None,
    *,
    count: int = 1,
    one_batch: bool = False,
) -> tuple[Any, list[dict[str, float]]]:
    """Trains up to `stop`; returns the state, on the host, and the metrics."""
    config = config.copy_and_resolve_references()
    config.num_steps, config.data.placement = num_steps, "host"
    steps = config.optimizer.get("warmup_steps", 0)
    config.optimizer.warmup_steps = min(steps, num_steps - 1)
    devices = _devices(count)
    experiment = Experiment.from_config(config, devices)
    if experiment.data.evaluation is not None:
        experiment = with_eval_batches(experiment, 2)
    if one_batch:
        dataset = experiment.data.train
        one = SimpleNamespace(batch=lambda step: dataset.batch(0))
        data = experiment.data._replace(train=one)
        experiment = dataclasses.replace(experiment, data=data)
    how = {"log_every": 1, "eval_every": max(1, num_steps // 2)}
    train = functools.partial(loop_of(config), workdir=workdir)
    result = train(experiment.trainer(devices), num_steps=stop or num_steps, **how)
    return devices.fetch(result.state), read(workdir / METRICS)

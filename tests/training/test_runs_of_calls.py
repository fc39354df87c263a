"""Calls of several steps in whole runs: language models, adapters, killed processes."""

import functools
import random
import signal
import subprocess
import time

import jax
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Finetuning
from haiku_template.params import flatten
from haiku_template.runs import train
from haiku_template.training import Experiment
from haiku_text.models import gpt
from haiku_text.tasks import language_model
from tests.test_commands import CODES, ROOT, command, digest, numbers
from tests.test_commands import train as run
from tests.training.test_calls import CALLS, alike

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 60, (48, 13)).astype(np.int32)
LORA = Lora(rank=2, alpha=4.0, patterns=("*/attention/*/w", "*/mlp/*/w"))
PLANS = {"gpt": Finetuning(), "lora": Finetuning(lora=LORA)}


@functools.cache
def made(devices, kind, count):
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "context": 12}
    spec = BatchSpec(8, labels="tokens")
    data = ArrayDataset(TOKENS[:, :-1], TOKENS[:, 1:], spec)
    return Experiment(
        model=gpt(60, **sizes),
        task=language_model,
        data=Data(data, None, 60, vocab_size=60),
        optimizer=optax.sgd(0.1),
        finetuning=PLANS[kind],
        steps_per_call=count,
    ).trainer(devices)


@pytest.mark.parametrize(
    "num_devices, kind",
    [
        pytest.param(1, "gpt", marks=pytest.mark.slow),
        pytest.param(4, "lora", marks=pytest.mark.slow),
        pytest.param(1, "lora", marks=pytest.mark.long),
        pytest.param(4, "gpt", marks=pytest.mark.long),
    ],
)
def test_a_language_model_is_the_same_however_many_steps_a_call_has(
    tmp_path, num_devices, kind, optimized
):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    first = jax.device_get(made(devices, kind, 1).init().params)
    states = [
        train(
            made(devices, kind, count),
            num_steps=60,
            workdir=tmp_path / str(count),
            log_every=20,
        ).state
        for count in CALLS
    ]
    moves = jax.tree.map(lambda x, y: abs(x - y).max(), states[0].params, first)
    assert max(x for x in flatten(moves).values()) > 1e-3
    for state in states[1:]:
        alike(states[0].params, state.params, 1e-6)
    alike(states[1].saved(), states[2].saved(), 0)


# Calls of 50 end where saves and logs, which no number of steps divides, are due.
FLAGS = (
    "--config=configs/digits.py",
    "--config.steps_per_call=50",
    "--config.num_steps=4000",
    "--config.log_every=70",
    "--config.eval_every=900",
    "--config.save_every=130",
)


@pytest.mark.slow
def test_runs_killed_amid_calls_end_as_one_that_was_not(tmp_path):
    """By SIGKILL and SIGTERM, at any moment after the first save."""
    undisturbed, workdir = tmp_path / "one", tmp_path / "two"
    done = run(undisturbed, *FLAGS[1:])
    assert done.returncode == 0, done.stderr
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = latest(workdir)
        process = subprocess.Popen(
            command("train", *FLAGS, f"--workdir={workdir}"),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while latest(workdir) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == CODES[number], errors
        assert before < latest(workdir) < 4000
    done = run(workdir, *FLAGS[1:])
    assert done.returncode == 0 and "resumed at step" in done.stdout, done.stderr
    assert (digest(workdir), numbers(workdir)) == (
        digest(undisturbed),
        numbers(undisturbed),
    )


def latest(workdir):
    """Step of the newest checkpoint; 0 without any."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)

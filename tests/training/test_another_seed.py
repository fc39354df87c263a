"""No program of a run has the seed in it: with another one JAX compiles none."""

import os
import subprocess
import sys

import pytest

from tests.runs import ROOT

CODE = """
import os, sys, haiku as hk, jax, numpy as np, optax
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.finetuning import Finetuning, Lora
from haiku_template.runs import train
from haiku_template.training import Experiment, classification

folder, count = sys.argv[1], int(sys.argv[2])
devices = DeviceManager.create("cpu", simulate_devices=count)
jax.config.update("jax_compilation_cache_dir", folder + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x, y = np.ones((64, 8), np.float32), np.arange(64, dtype=np.int32) % 3
data = Data(ArrayDataset(x, y, BatchSpec(16)), EvaluationSet(x, y, 16), 3)

def forward(x, is_training):
    return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.1, x))

tuned = Finetuning(train=(), lora=Lora(rank=1, patterns=("*linear/w",)))
for name, parts, options in (
    ("plain", {}, {}),
    ("adapters", {"finetuning": tuned}, {}),
    ("shares", {"exact_elastic": 4}, {}),
    ("replay", {}, {"sdc_replay": "first:3"}),
):
    files = []
    for seed in (0, 1):
        parts |= {"model": hk.transform_with_state(forward), "data": data}
        parts |= {"task": classification, "optimizer": optax.adam(1e-3), "seed": seed}
        trainer = Experiment(**parts).trainer(devices)
        workdir = f"{folder}/{name}{seed}"
        result = train(trainer, num_steps=8, workdir=workdir, log_every=4, **options)
        list(trainer.predict(result.state))
        files.append({*os.listdir(folder + "/cache")})
    assert files[0] and files[1] == files[0], (name, files[1] - files[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", ["1", "4"])
def test_another_seed_compiles_nothing(tmp_path, num_devices):
    command = [sys.executable, "-c", CODE, str(tmp_path), num_devices]
    done = subprocess.run(
        command, env=os.environ, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]

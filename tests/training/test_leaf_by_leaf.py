"""What is read for a sharded state passes the host and the devices leaf by leaf."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.finetuning import source
from haiku_template.params import flatten
from haiku_template.runs import Run, start
from haiku_template.training import Experiment
from tests.runs import run_steps

MODEL = "tests.training.test_leaf_by_leaf:layers"


def layers(num_outputs, axis_name, width, num_layers):
    del axis_name

    def forward(x):
        x = hk.Linear(width, name="first")(hk.Flatten()(x))
        for i in range(num_layers):
            x = x + jnp.tanh(hk.Linear(width, name=f"layer_{i}")(x))
        return hk.Linear(num_outputs, name="head")(x)

    return hk.without_apply_rng(hk.transform(forward))


def trainer_of(init_from, width, num_layers, num_devices=8, **keys):
    config = digits.get_config()
    config.model = {"name": MODEL, "width": width, "num_layers": num_layers}
    config.init_from, config.sharding = init_from and str(init_from), (("*", "data"),)
    config.optimizer.name, config.optimizer.warmup_steps = "sgd", 0
    config.update_from_flattened_dict(keys)
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return config, Experiment.from_config(config, devices).trainer(devices)


def bytes_by_device(arrays):
    """Bytes of arrays that are alive on each device, the same memory counted once."""
    buffers = {}
    for array in arrays:
        for shard in [] if array.is_deleted() else array.addressable_shards:
            pointer = shard.device, shard.data.unsafe_buffer_pointer()
            buffers[pointer] = shard.data.nbytes
    counts = dict.fromkeys(jax.devices(), 0)
    for (device, _), size in buffers.items():
        counts[device] += size
    return counts


@pytest.fixture
def most_alive(monkeypatch):
    """Most new bytes on any device so far, looked at after each copy to the devices."""
    # With the arrays, which stay alive: an id is of one of them.
    before, peak = {id(x): x for x in jax.live_arrays()}, [0]

    def look():
        new = [x for x in jax.live_arrays() if id(x) not in before]
        peak[0] = max(peak[0], *bytes_by_device(new).values())
        return peak[0]

    for name in ("device_put", "make_array_from_callback", "block_until_ready"):
        call = functools.partial(_then, look, getattr(jax, name))
        monkeypatch.setattr(jax, name, call)
    return look


def _then(look, function, *args, **kwargs):
    result = function(*args, **kwargs)
    look()
    return result


WIDTH, LAYERS = 256, 8
TUNINGS = {
    "trained": {},
    "averaged": {"ema_decay": 0.9},
    "frozen": {"finetuning.lora.rank": 2},
    "int8": {"finetuning.lora.rank": 2, "finetuning.base_dtype": "int8"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A run's workdir, and a file with its parameters."""
    folder = tmp_path_factory.mktemp("sources")
    config, _ = trainer_of(None, WIDTH, LAYERS, num_steps=1)
    devices = DeviceManager.create("cpu", num_devices=8)
    start.run(config, devices, str(folder / "run"))
    state = Run.open(folder / "run", devices).state
    file = folder / "model.safetensors"
    save_file({k: np.array(x) for k, x in flatten(state.params).items()}, file)
    return {"run": folder / "run", "file": file}


@pytest.mark.slow(but="run-int8")
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("kind", ["file", "run"])
def test_no_device_has_more_than_its_share_and_a_leaf(
    sources, kind, tuning, monkeypatch, most_alive
):
    monkeypatch.setattr(source, "GROUP", 1)
    path, keys = sources[kind], TUNINGS[tuning]
    _, trainer = trainer_of(path, WIDTH, LAYERS, **keys)
    state = trainer.init()
    peak, leaf = most_alive(), 4 * WIDTH**2
    end = max(bytes_by_device(jax.tree.leaves(state)).values())
    assert end <= peak <= 1.02 * (end + leaf)
    assert peak < 0.6 * LAYERS * leaf  # The whole model would be seen.
    merged, _ = trainer.merged(state)
    assert most_alive() <= 1.02 * end + 4 * leaf  # The host's are here those of cpu:0.
    assert flatten(merged)["layer_0/w"].shape == (WIDTH, WIDTH)
    trainer.devices.check(state, trainer.layout)
    _, one = trainer_of(path, WIDTH, LAYERS, 1, **keys)
    for a, b in zip(*map(jax.tree.leaves, (state, one.init())), strict=True):
        np.testing.assert_array_equal(a, b)
    run_steps(trainer, 1, state)


# Peak of the anonymous memory of a process that begins a run from a file.
PROGRAM = """
import dataclasses, json, sys, threading, time
import jax
jax.config.update("jax_num_cpu_devices", 8)
import optax
from tests.training.test_leaf_by_leaf import trainer_of

def anonymous():
    status = open("/proc/self/status").read()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])

def watch():
    while not ended.wait(0.002):
        peak[0] = max(peak[0], anonymous())

_, trainer = trainer_of(sys.argv[1], *map(int, sys.argv[2:]))
experiment = dataclasses.replace(trainer.experiment, optimizer=optax.sgd(0.1))
trainer = experiment.trainer(trainer.devices)
ended, peak = threading.Event(), [anonymous()]
thread = threading.Thread(target=watch)
thread.start()
state = jax.block_until_ready(trainer.init())
ended.set()
thread.join()
leaf = state.params["layer_0"]["w"]
assert not leaf.is_fully_replicated
print(json.dumps({"peak": peak[0], "first": float(leaf[0, 0])}))
"""


def peak_of(file, width, num_layers):
    """Writes a file of parameters, reads it in a process: its size, and the peak."""
    init = layers(10, None, width, num_layers).init
    shapes = flatten(jax.eval_shape(init, jax.random.key(0), np.ones((1, 64))))
    ramp = np.linspace(-0.1, 0.1, 999, dtype=np.float32)
    save_file({k: np.resize(ramp, x.shape) for k, x in shapes.items()}, file)
    command = [sys.executable, "-c", PROGRAM, file, str(width), str(num_layers)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["first"] == pytest.approx(-0.1)
    return file.stat().st_size, result["peak"]


@pytest.mark.slow
def test_a_process_needs_little_more_memory_than_the_file_has(tmp_path):
    _, baseline = peak_of(tmp_path / "small.safetensors", 16, 24)
    size, peak = peak_of(tmp_path / "large.safetensors", 2048, 24)
    assert size > 4e8
    assert size < peak - baseline < 1.15 * size

"""Seconds from a command to its first finished step, next to a bare script.

    python -m benchmarks.start

The command is `python -m haiku_template.train --config=configs/digits.py`. The bare
script, below, has its model, optimizer and batch, compiles the first parameters and the
step by `jax.jit`, and has nothing of this package, but imports the third-party modules
that the command has imported by then. Both are new processes, in turns, each with a
persistent compilation cache of its own, the command's by its own default: the first
round finds it empty and is told apart. Both keep Python's bytecode, as installed
packages do. The clock stops at the line with the first loss.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 9
IMPORTS = (
    "absl.app absl.logging haiku jax jax.experimental.multihost_utils jax.export jmp "
    "ml_collections.config_flags numpy optax optax.contrib orbax.checkpoint "
    "orbax.checkpoint.experimental.v1 rich.console rich.progress rich.table "
    "safetensors.numpy tensorstore"
)
BARE = f"""
import gzip
import importlib.util

for name in "{IMPORTS}".split():
    importlib.import_module(name)

import haiku as hk
import jax
import numpy as np
import optax

folder = importlib.util.find_spec("sklearn").submodule_search_locations[0]
with gzip.open(folder + "/datasets/data/digits.csv.gz", "rt") as file:
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
images, labels = table[:128, :64] / 16, table[:128, 64].astype(np.int32)
net = hk.without_apply_rng(
    hk.transform(lambda images: hk.nets.MLP([256, 256, 10])(images))
)
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 2000)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-2)
)


def loss(params, images, labels):
    logits = net.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step(params, opt_state, images, labels):
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def init(rng):
    params = net.init(rng, images[:1])
    return params, optimizer.init(params)


params, opt_state = jax.jit(init)(jax.random.key(0))
step = jax.jit(step, donate_argnums=(0, 1))
params, opt_state, value = step(params, opt_state, *jax.device_put((images, labels)))
print("step 1 loss", value, flush=True)
"""


def seconds(command: list[str], **settings: str) -> tuple[float, float]:
    """Wall-clock and processor seconds of a command, up to the first loss it prints."""
    begun, settings = time.perf_counter(), os.environ | settings
    settings.pop("PYTHONDONTWRITEBYTECODE", None)  # Or ours is compiled at each start.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=settings,
    ) as process:
        for line in process.stdout:
            if line.startswith(b"step") and b"loss" in line:
                wall = time.perf_counter() - begun
                break
        else:
            raise RuntimeError(f"{command[1]} ended without a step")
        process.send_signal(signal.SIGKILL)
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = -signal.SIGKILL
    return wall, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prints seconds of both, with a cold cache and warm ones, and their ratio."""
    train = ["-m", "haiku_template.train", "--config=configs/digits.py"]
    train += ["--device=cpu", "--config.log_every=1"]
    times: dict[str, list[tuple[float, float]]] = {"whole": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        for n in range(ROUNDS + 1):
            command = [sys.executable, *train, f"--workdir={folder}/run-{n}"]
            times["whole"].append(seconds(command, XDG_CACHE_HOME=f"{folder}/whole"))
            command = [sys.executable, str(script)]
            times["bare"].append(
                seconds(
                    command,
                    JAX_COMPILATION_CACHE_DIR=f"{folder}/bare",
                    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
                )
            )
    for i, clock in enumerate(("wall-clock", "processor")):
        for name, values in times.items():
            cold, *warm = [value[i] for value in values]
            low, middle, high = statistics.quantiles(warm, n=4)
            print(
                f"{clock} {name:>6} {middle:5.2f} s ({low:.2f}-{high:.2f}), "
                f"cold {cold:.2f} s"
            )
        pairs = zip(times["whole"][1:], times["bare"][1:], strict=True)
        ratios = [whole[i] / bare[i] for whole, bare in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{clock} whole / bare {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()

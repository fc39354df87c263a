"""A small GPT's training step on CPUs: this package, bare Haiku, PyTorch eager.

    python -m benchmarks.gpt_on_cpu --torch=PYTHON_WITH_PYTORCH [--threads=1]

The model of `configs/gpt_bytes.py`: 0.84 M parameters, 16 windows of 128 bytes,
float32, AdamW, clipping; forward and backward pass and update, on one batch. Each runs
in a process of its own, a few steps at a time in turns; ratios are medians of rounds.
CPU time tells more than wall time where other processes take turns; PyTorch's threads
spin while they wait, so that it is comparable with --threads=1 alone. With --trace=FILE
this package's step is traced, and its kernels are written by kind, shortest times.
"""

import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH_SIZE, LAYERS = 256, 128, 4, 128, 16, 4
WARM_UP, TRACED = 3, 25  # Steps.
Steps = Callable[[int], float]  # So many steps; the last loss.


def bare_logits(tokens: jax.Array) -> jax.Array:
    """Logits of a GPT of Haiku's modules and JAX's attention."""
    embed = hk.Embed(VOCABULARY, WIDTH, name="embed")
    x = embed(tokens) + hk.Embed(CONTEXT, WIDTH, name="positions").embeddings
    for _ in range(LAYERS):
        y = hk.Linear(3 * WIDTH)(hk.LayerNorm(-1, True, True)(x))
        heads = (-1, CONTEXT, HEADS, WIDTH // HEADS)
        arrays = (y.reshape(heads) for y in jnp.split(y, 3, axis=-1))
        y = jax.nn.dot_product_attention(*arrays, is_causal=True)
        x += hk.Linear(WIDTH)(y.reshape(x.shape))
        y = hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x))
        x += hk.Linear(WIDTH)(jax.nn.gelu(y))
    return hk.LayerNorm(-1, True, True)(x) @ embed.embeddings.T


def _bare_loss(tokens: jax.Array, labels: jax.Array) -> jax.Array:
    logits = bare_logits(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def bare() -> Steps:
    """Steps of `jax.jit`, Haiku and optax alone."""
    model = hk.without_apply_rng(hk.transform(_bare_loss))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(2e-3, b2=0.99, weight_decay=0.1)
    )
    shape = (BATCH_SIZE, CONTEXT)
    batch = np.random.default_rng(0).integers(0, VOCABULARY, (2, *shape), np.int32)
    params = model.init(jax.random.key(0), *batch)
    state = params, optimizer.init(params)

    def step(state: tuple, batch: tuple) -> tuple:
        params, opt_state = state
        loss, grads = jax.value_and_grad(model.apply)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    step, batch = jax.jit(step, donate_argnums=0), tuple(jax.device_put(batch))

    def steps(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, loss = step(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return steps


def template() -> Steps:
    """Steps of this package's trainer."""
    steps, _ = _trainer()
    return steps


def _trainer() -> tuple[Steps, str]:
    """The same, and the compiled program."""
    # The peers hold nothing of this package, nor does importing this file.
    from configs import gpt_bytes
    from haiku_template.devices import DeviceManager
    from haiku_template.training import Experiment

    devices = DeviceManager.create("cpu", num_devices=1)
    trainer = Experiment.from_config(gpt_bytes.get_config(), devices).trainer(devices)
    state = trainer.init()
    with trainer.calls(0, 1, lambda step: True) as calls:
        (call,) = calls

    def steps(count: int) -> float:
        nonlocal state
        for _ in range(count):
            state, scalars = trainer.advance(state, *call)
        jax.block_until_ready(state)
        return float(jax.device_get(scalars.first()["loss"]))

    lowered = trainer.trace(trainer.feed.host_shapes()[0]).lower()
    return steps, lowered.compile().as_text()


def serve(name: str) -> None:
    """Runs as many steps as each line of the input says, and prints what they took."""
    steps = {"template": template, "bare": bare}[name]()
    print(f"jax {jax.__version__}, XLA_FLAGS {os.environ.get('XLA_FLAGS')}", flush=True)
    for line in sys.stdin:
        begun = time.perf_counter(), time.process_time()
        loss = steps(int(line))
        now = time.perf_counter(), time.process_time()
        print(now[0] - begun[0], now[1] - begun[1], loss, flush=True)


class Peer:
    """A process that trains when it is asked to."""

    def __init__(self, command: list[str], threads: int | None) -> None:
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=env, text=True
        )
        self.versions = self.process.stdout.readline().strip()
        self.run(WARM_UP)

    def run(self, steps: int) -> tuple[float, float]:
        """Wall and CPU milliseconds of a step."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        wall, cpu, _ = map(float, self.process.stdout.readline().split())
        return wall / steps * 1e3, cpu / steps * 1e3

    def stop(self) -> None:
        """Lets the process end, and waits for it."""
        self.process.communicate()


def race(peers: dict[str, Peer], rounds: int, steps: int) -> None:
    """Prints medians and spread of both times, and speed as a share of the first's."""
    times = {name: [] for name in peers}
    for _ in range(rounds):
        for name, peer in peers.items():
            times[name].append(peer.run(steps))
    first = times[next(iter(peers))]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{rounds} rounds of {steps} steps in turns; load {load}")
    for name, pairs in times.items():
        cells = [f"{name:>10}"]
        for place, kind in enumerate(("wall", "CPU")):
            values = [pair[place] for pair in pairs]
            middle, low, high = statistics.median(values), min(values), max(values)
            ratios = [a[place] / b[place] for a, b in zip(first, pairs, strict=True)]
            ratio = statistics.median(ratios)
            cells.append(f"{kind} {middle:6.1f} ms ({low:.1f}-{high:.1f})")
            cells.append(f"speed {ratio:4.2f}")
        tokens = BATCH_SIZE * CONTEXT / statistics.median(w for w, _ in pairs) * 1e3
        print("  ".join([*cells, f"{tokens:7,.0f} tokens/s  {peers[name].versions}"]))


def trace(path: Path) -> None:
    """Writes the shortest time of each kernel of our step, added up by kind."""
    steps, program = _trainer()
    steps(WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            steps(TRACED)
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    durations = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            durations[event["name"]].append(event["dur"])
    pattern = r"^\s+(?:ROOT )?%?([\w.\-]+) = (\S+?)\{.*? ([\w\-]+)\((.*?)\)"
    pattern += r'(?:.*?op_name="(.*?)")?'
    entry = program[program.index("\nENTRY") :]
    times, counts = Counter(), Counter()
    for name, shape, _, _, source in re.findall(pattern, entry, re.MULTILINE):
        if name in durations:
            kind = re.sub(r"[.\d]+$", "", name)
            key = f"{kind} {shape} {re.sub(r'_?[0-9]', '', source)[-60:]}"
            times[key] += min(durations[name])
            counts[key] += 1
    lines = [f"{sum(times.values()) / 1e3:.1f} ms in {sum(counts.values())} kernels"]
    lines += [
        f"{us:8.0f} us {counts[key]:4} x {key}" for key, us in times.most_common()
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"{lines[0]}; written to {path}")


def main() -> None:
    """Parses the flags and runs."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--threads", type=int, help="CPU cores; by default all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="of a round")
    parser.add_argument("--trace", type=Path, help="write this step's kernels here")
    parser.add_argument("--serve", choices=("template", "bare"), help="a child process")
    flags = parser.parse_args()
    if flags.threads:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[-flags.threads :])
    if flags.serve:
        return serve(flags.serve)
    if flags.trace:
        return trace(flags.trace)
    ours = [sys.executable, "-m", "benchmarks.gpt_on_cpu"]
    commands = {name: [*ours, f"--serve={name}"] for name in ("template", "bare")}
    if flags.torch:
        file = Path(__file__).with_name("torch_gpt.py")
        commands = {"PyTorch": [flags.torch, str(file)]} | commands
    peers = {name: Peer(line, flags.threads) for name, line in commands.items()}
    race(peers, flags.rounds, flags.steps)
    for peer in peers.values():
        peer.stop()


if __name__ == "__main__":
    main()

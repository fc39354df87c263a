"""The whole loop next to a bare loop with the same model: ResNet, GPT, ProteinMPNN.

    make published       # fetches ProteinMPNN, which is left out without it
    python -m benchmarks.models [--models resnet gpt]

The ResNet and the GPT are of Haiku's own modules, ProteinMPNN is ColabDesign's, with
its published parameters' sizes. The bare loop is `jax.jit`, `device_put` and optax, and
nothing of this package; its batches are made beforehand. The whole loop makes them, and
has its checks, metrics on disk and progress bar. Rounds are interleaved, ratios are of
the same round; medians and quartiles go to build/bench/models_NAME.json and .png. Each
loop has a process of its own, and several after another, since two processes of the
same loop differ by up to a tenth.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import rounds
from benchmarks.gpt_on_cpu import bare_logits
from benchmarks.overhead import whole_loop
from haiku_template import compat
from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.preflight import settle
from haiku_template.training import Experiment, Task

LEARNING_RATE, LOG_EVERY = 1e-3, 50  # As `train` has it by default.
PROTEINS = Path("build/published")


class Model(NamedTuple):
    """A model as both loops train it.

    It gives logits of `inputs(batch)`, and its loss is the cross-entropy of these with
    the array `labels` of a batch, weighted by the array `weight`.
    """

    net: hk.TransformedWithState
    data: Data
    inputs: Callable[[dict[str, Any]], Any]
    labels: str
    weight: str | None
    num_steps: int  # Of a round.


def resnet() -> Model:
    """Narrow ResNet-18 on images of 32 x 32."""

    def net(images: jax.Array, is_training: bool) -> jax.Array:
        channels = (16, 32, 64, 128)
        resnet = hk.nets.ResNet((2, 2, 2, 2), 10, None, False, False, channels)
        return resnet(images, is_training)

    rng = np.random.default_rng(0)
    images = rng.normal(size=(1024, 32, 32, 3)).astype(np.float32)
    labels = rng.integers(0, 10, 1024, np.int32)
    data = Data(ArrayDataset(images, labels, BatchSpec(32)), None, 10)
    return Model(hk.transform_with_state(net), data, _inputs, "labels", None, 110)


def gpt() -> Model:
    """GPT of 0.84 M parameters on windows of 128 bytes."""

    def net(tokens: jax.Array, is_training: bool) -> jax.Array:
        del is_training
        return bare_logits(tokens)

    tokens = np.random.default_rng(0).integers(0, 256, (1024, 129), np.int32)
    rows = ArrayDataset(tokens[:, :-1], tokens[:, 1:], BatchSpec(16))
    net = hk.with_empty_state(hk.transform(net))
    return Model(net, Data(rows, None, 256), _inputs, "labels", None, 30)


def proteinmpnn() -> Model:
    """ProteinMPNN of 1.66 M parameters on the structures of its config."""
    from configs import finetune_proteinmpnn
    from examples import proteinmpnn

    compat.install()  # The model calls what JAX removed.
    config = finetune_proteinmpnn.get_config()
    fields = {k: v for k, v in config.data.items() if v is not None}
    parts = {k: fields[k] for k in ("path", "train", "held_out", "lengths")}
    data = proteinmpnn.data(BatchSpec(config.batch_size), **parts)
    net = proteinmpnn.model(21, None, code=str(PROTEINS), noise=0.2, dropout=0.1)
    one = hk.with_empty_state(net)

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        return one.init(rng, jax.tree.map(lambda x: x[0], inputs), is_training)

    def apply(
        params: Any, state: Any, rng: jax.Array, inputs: Any, is_training: bool
    ) -> Any:
        of_one = lambda x: one.apply(params, state, rng, x, is_training)[0]  # noqa: E731
        return jax.vmap(of_one)(inputs), state  # The model takes one structure.

    mapped = hk.TransformedWithState(init, apply)
    return Model(mapped, data, dict, "S", "mask", 6)


def _inputs(batch: dict[str, Any]) -> Any:
    return batch["inputs"]


def _losses(model: Model, logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    labels = batch[model.labels]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def bare_loop(model: Model, device: jax.Device) -> rounds.Loop:
    """Steps per second without this package."""
    batches = [model.data.train.batch(n) for n in range(16)]
    optimizer = optax.adam(LEARNING_RATE)

    def loss(params: Any, net_state: Any, rng: jax.Array, batch: Any) -> Any:
        inputs = model.inputs(batch)
        outputs, net_state = model.net.apply(params, net_state, rng, inputs, True)
        values = _losses(model, outputs, batch)
        if model.weight is None:
            return values.mean(), net_state
        weights = batch[model.weight]
        return (values * weights).sum() / weights.sum(), net_state

    def step(carry: Any, rng: jax.Array, batch: Any) -> Any:
        params, net_state, opt_state, n = carry
        rng = jax.random.fold_in(rng, n)
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, net_state), grads = gradient(params, net_state, rng, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return (params, net_state, opt_state, n + 1), value

    rng = jax.random.key(0)
    compiled = jax.jit(step, donate_argnums=0)

    def loop() -> float:
        params, net_state = jax.jit(model.net.init, static_argnums=2)(
            rng, model.inputs(batches[0]), True
        )
        carry = params, net_state, optimizer.init(params), jnp.zeros((), jnp.int32)
        carry = jax.device_put(carry, device)
        for n in range(model.num_steps):
            batch = jax.device_put(batches[n % len(batches)], device)
            carry, value = compiled(carry, rng, batch)
            if n == 0:
                jax.block_until_ready(value)  # Its compilation is no step.
                begun = time.perf_counter()
        jax.block_until_ready(carry)
        return (model.num_steps - 1) / (time.perf_counter() - begun)

    return loop


def make_loop(model: Model, name: str) -> tuple[rounds.Loop, str]:
    """Makes the loop `whole` or `bare`; says where it runs."""
    devices = DeviceManager.create("auto", num_devices=1)
    if name == "bare":
        return bare_loop(model, devices.devices[0]), devices.describe()

    def values(outputs: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        loss = {"loss": _losses(model, outputs, batch)}
        if model.weight is None:
            return loss
        return loss | {"example_weight": batch[model.weight].astype(jnp.float32)}

    experiment = Experiment(
        model=model.net,
        task=Task(values, "any"),
        data=model.data,
        optimizer=optax.adam(LEARNING_RATE),
    )
    trainer = settle(experiment.trainer(devices), Path("of a new run"))
    loop = lambda: whole_loop(trainer, LOG_EVERY, model.num_steps)  # noqa: E731
    return loop, devices.describe()


MODELS = {make.__name__: make for make in (resnet, gpt, proteinmpnn)}


def main() -> None:
    """Runs both loops of each model in turns, or with --serve one for that process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--processes", type=int, default=3, help="one after another")
    parser.add_argument("--rounds", type=int, default=5, help="in each process")
    parser.add_argument("--serve", metavar="LOOP", help="whole or bare, of the model")
    options = parser.parse_args()
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    if options.serve:
        model = MODELS[options.models[0]]()
        return rounds.serve(lambda: make_loop(model, options.serve))
    for name in options.models:
        if name == "proteinmpnn" and not PROTEINS.is_dir():
            print("ProteinMPNN is not here: `make published`")
            continue
        rates: dict[str, list[float]] = {"whole": [], "bare": []}
        for _ in range(options.processes):
            facts = _measure(name, rates, options.rounds)
        facts["title"] = MODELS[name].__doc__
        facts["command"] = f"python -m benchmarks.models --models {name}"
        rounds.report(f"models_{name}", rates, "bare", facts)


def _measure(
    name: str, rates: dict[str, list[float]], num_rounds: int
) -> dict[str, Any]:
    """Adds to the rates those of new processes, one for each loop; returns facts."""
    command = [sys.executable, "-m", "benchmarks.models", f"--models={name}"]
    with contextlib.ExitStack() as stack:
        loops, facts = {}, {}
        for loop in rates:
            process = rounds.served([*command, f"--serve={loop}"])
            loops[loop], facts = stack.enter_context(process)
        for loop, values in rounds.alternate(loops, num_rounds).items():
            rates[loop] += values
    return facts


if __name__ == "__main__":
    main()

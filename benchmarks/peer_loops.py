"""Loops of other libraries, each as its own users would write it, for `peers.py`.

    python -m benchmarks.peer_loops keras digits.npz

Runs in the environment of `peers.txt`, which has nothing of this package. All train
the MLP of 64-128-128-10 with Adam on shuffled batches of 64 from arrays in memory; each
reports its loss to nobody. Keras's steps in a call are chosen by short tries. What was
chosen is in a loop's description.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.rounds import Loop, serve

NUM_STEPS, TRY_STEPS, BATCH_SIZE, LEARNING_RATE = 3000, 500, 64, 1e-3
STEPS_PER_CALL = (1, 5, 10, 25, 50)


def best(rate: Callable[[int, int], float], settings: Sequence[int]) -> int:
    """Setting with the highest rate in short tries, after one that compiles."""
    rates = {}
    for setting in settings:
        rate(setting, TRY_STEPS)
        rates[setting] = max(rate(setting, TRY_STEPS) for _ in range(3))
    return max(rates, key=rates.get)


def epochs(num_rows: int, num_steps: int, seed: int = 0) -> np.ndarray:
    """Row numbers of so many batches, each epoch shuffled anew: [steps, batch]."""
    rng, whole = np.random.default_rng(seed), num_rows // BATCH_SIZE
    orders = [
        rng.permutation(num_rows)[: whole * BATCH_SIZE]
        for _ in range(-(-num_steps // whole))
    ]
    return np.concatenate(orders).reshape(-1, BATCH_SIZE)[:num_steps]


def keras_loop(
    images: np.ndarray, labels: np.ndarray, settings: Sequence[int]
) -> tuple[Loop, str]:
    """`model.fit` on JAX, one epoch of all steps, with the best of the settings."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    models: dict[int, Any] = {}

    def model_of(steps_per_execution: int) -> Any:
        if steps_per_execution not in models:
            dense = keras.layers.Dense
            layers = [dense(128, "relu"), dense(128, "relu"), dense(10)]
            model = keras.Sequential([keras.Input((64,)), *layers])
            model.compile(
                keras.optimizers.Adam(LEARNING_RATE),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=steps_per_execution,
                jit_compile=True,
            )
            models[steps_per_execution] = model
        return models[steps_per_execution]

    rows = epochs(len(images), NUM_STEPS).reshape(-1)
    x, y = images[rows], labels[rows]

    def rate(steps_per_execution: int, num_steps: int = NUM_STEPS) -> float:
        model, count = model_of(steps_per_execution), num_steps * BATCH_SIZE
        begun = time.perf_counter()
        model.fit(x[:count], y[:count], batch_size=BATCH_SIZE, verbose=0)
        return num_steps / (time.perf_counter() - begun)

    steps = best(rate, settings) if len(settings) > 1 else settings[0]
    return lambda: rate(steps), f"steps_per_execution={steps}, jit_compile=True"


def torch_loop(
    images: np.ndarray, labels: np.ndarray, compiled: bool
) -> tuple[Loop, str]:
    """A loop over tensors in memory with fused Adam, eager or `torch.compile`d."""
    import torch

    torch.set_num_threads(1)  # Two took 4 to 35 times as long, on two busy cores.
    model = _torch_model()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    x, y = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))

    def loss_of(x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), y)

    if compiled:
        loss_of = torch.compile(loss_of)

    def loop() -> float:
        rows = torch.from_numpy(epochs(len(images), NUM_STEPS))
        begun = time.perf_counter()
        for batch in rows:
            optimizer.zero_grad(set_to_none=True)
            loss_of(x[batch], y[batch]).backward()
            optimizer.step()
        return NUM_STEPS / (time.perf_counter() - begun)

    return loop, "fused Adam, one thread" + ", torch.compile of the loss" * compiled


def _torch_model() -> Any:
    from torch import nn

    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def lightning_loop(images: np.ndarray, labels: np.ndarray) -> tuple[Loop, str]:
    """`Trainer(barebones=True)`: without logging, checkpoints and progress bar."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _torch_model()

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return torch.nn.functional.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Any:
            parameters = self.parameters()
            return torch.optim.Adam(parameters, LEARNING_RATE, fused=True)

        def on_train_start(self) -> None:
            self.begun = time.perf_counter()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.begun

    x, y = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
    data = TensorDataset(x, y)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)

    def loop() -> float:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, barebones=True, max_steps=NUM_STEPS
        )
        module = Module()
        trainer.fit(module, loader)
        return NUM_STEPS / module.seconds

    return loop, "barebones=True, fused Adam, one thread"


def nnx_loop(images: np.ndarray, labels: np.ndarray) -> tuple[Loop, str]:
    """`nnx.jit` with `nnx.cached_partial`, batches of NumPy."""
    import jax
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(64, 128, rngs=rngs)
            self.second = nnx.Linear(128, 128, rngs=rngs)
            self.last = nnx.Linear(128, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.second(nnx.relu(self.first(x))))
            return self.last(x)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, x: Any, y: Any) -> jax.Array:
        def loss_of(model: Model) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    step = nnx.cached_partial(train_step, model, optimizer)

    def loop() -> float:
        rows = epochs(len(images), NUM_STEPS)
        begun = time.perf_counter()
        for batch in rows:
            loss = step(images[batch], labels[batch])
        jax.block_until_ready(loss)
        return NUM_STEPS / (time.perf_counter() - begun)

    return loop, "nnx.jit, nnx.cached_partial"


LOOPS: dict[str, Callable[[np.ndarray, np.ndarray], tuple[Loop, str]]] = {
    "Keras": lambda x, y: keras_loop(x, y, [1]),
    "Keras, best": lambda x, y: keras_loop(x, y, STEPS_PER_CALL),
    "PyTorch": lambda x, y: torch_loop(x, y, compiled=False),
    "PyTorch, compiled": lambda x, y: torch_loop(x, y, compiled=True),
    "Lightning": lightning_loop,
    "Flax NNX": nnx_loop,
}


def main() -> None:
    """Serves the loop that is named, on the images and labels of a file."""
    name, path = sys.argv[1:]
    with np.load(path) as file:
        images, labels = file["images"], file["labels"]
    serve(lambda: LOOPS[name](images, labels))


if __name__ == "__main__":
    main()

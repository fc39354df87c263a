"""What packing short examples gains, next to batches of few lengths.

    python -m benchmarks.packing

A small GPT on bytes trains on the sentences of Python's `help()` topics, the first
quarter of each being its prompt: packed into windows of 256, in buckets, and padded to
one length. Batches have about as many tokens. Rounds are interleaved; tokens are those
of examples, padding left out.
"""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import optax

from haiku_template.data import BatchSpec, each_shape
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment, Trainer
from haiku_text.data import jsonl
from haiku_text.data.documents import read_documents
from haiku_text.models import gpt
from haiku_text.tasks import language_model

ROUNDS, STEPS, CONTEXT = 7, 4, 256
WAYS = {
    "packed": {"packing": True},
    "4 buckets": {"num_buckets": 4},
    "1 length": {"num_buckets": 1},
}


def write_sentences(path: Path) -> None:
    """Writes prompts and completions of at most `CONTEXT` bytes."""
    texts = (document.content.decode() for document in read_documents("pydoc"))
    found = (re.split(r"(?<=[.:])\s+|\n\n", text) for text in texts)
    words = [" ".join(part.split()) for parts in found for part in parts]
    with path.open("w") as file:
        for text in (w for w in words if 10 < len(w.encode()) < CONTEXT):
            cut = len(text) // 4
            line = {"prompt": text[:cut], "completion": text[cut:]}
            file.write(json.dumps(line) + "\n")


def make(path: Path, devices: DeviceManager, **options: object) -> Trainer:
    """Makes the trainer of one way to batch, and compiles each of its lengths."""
    size = 8 if "packing" in options else 24
    spec = BatchSpec(size, labels="tokens")
    data = jsonl(spec, path=str(path), context=CONTEXT, **options)
    model = gpt(256, num_layers=4, width=128, num_heads=4, context=CONTEXT)
    trainer = Experiment(
        model=model, task=language_model, data=data, optimizer=optax.adam(1e-3)
    ).trainer(devices)
    for batch in each_shape(data.train):
        jax.block_until_ready(trainer.step(trainer.init(), devices.shard(batch)))
    return trainer


def rounds(trainer: Trainer) -> Iterator[tuple[float, float]]:
    """Yields each round's tokens in a second, and their share of all places."""
    devices, train, step = trainer.devices, trainer.experiment.data.train, 0
    state = trainer.init()
    while True:
        batches = [train.batch(step + i) for i in range(STEPS)]
        step += STEPS
        real = sum(_tokens(batch) for batch in batches)
        whole = sum(batch["labels"].size for batch in batches)
        begun = time.perf_counter()
        for batch in batches:
            state, scalars = trainer.step(state, devices.shard(batch))
            jax.block_until_ready(scalars)
        yield real / (time.perf_counter() - begun), real / whole


def _tokens(batch: dict) -> int:
    """Counts tokens by the loss mask's end: padding follows the last that counts."""
    if isinstance(batch["inputs"], dict):
        return int((batch["inputs"]["segments"] > 0).sum())
    mask = batch["loss_mask"][:, ::-1]
    return int((mask.shape[1] - mask.argmax(axis=1)).sum())


def main() -> None:
    """Prints medians and ranges, and ratios of the medians."""
    devices = DeviceManager.create("cpu", num_devices=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sentences.jsonl"
        write_sentences(path)
        runs = {name: rounds(make(path, devices, **w)) for name, w in WAYS.items()}
        found = [{name: next(run) for name, run in runs.items()} for _ in range(ROUNDS)]
    medians = {}
    for name in WAYS:
        speeds, shares = zip(*(one[name] for one in found), strict=True)
        medians[name] = statistics.median(speeds)
        print(
            f"{name:10} {medians[name]:,.0f} tokens/s ({min(speeds):,.0f}-"
            f"{max(speeds):,.0f}), {statistics.mean(shares):.1%} of a batch"
        )
    for name in list(WAYS)[1:]:
        ratio = medians["packed"] / medians[name]
        print(f"packed is {ratio:.2f} times as fast as {name}")


if __name__ == "__main__":
    main()

"""Hook `samples` of a config: what a language model writes at each evaluation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models.precision import Precision
from haiku_template.params import flatten
from haiku_template.reporting import tensorboard
from haiku_template.runs.hooks import at_evaluations
from haiku_template.storage.files import append_whole
from haiku_template.training.trainer import Trainer
from haiku_text.data import Tokenizer
from haiku_text.generation import LanguageModel, Sampling, make_generate, pieces

PROMPTS, BEGINNING, WRITTEN = 3, 16, 100  # Texts, and tokens of each.


def samples(trainer: Trainer, workdir: Path) -> Callable[[Any], None]:
    """Makes a hook that continues the beginnings of three texts of the evaluation set.

    They are appended to samples.jsonl, `step`, `prompt` and `text`, and to TensorBoard.
    Raises `ConfigError` for a model that writes no text, or data that does not say what
    its tokens stand for.
    """
    experiment, devices = trainer.experiment, trainer.devices
    family, data = experiment.family, experiment.data
    if family is None or family.tables is None or data.evaluation is None:
        raise ConfigError(
            "config.hooks=samples is for a language model (gpt) with an evaluation set"
        )
    if data.text is None:
        raise ConfigError(
            "config.hooks=samples needs to know what tokens stand for, which the data "
            f"set {experiment.config.get('data', {}).get('name', '')} does not say"
        )
    tokenizer = Tokenizer(data.text)
    # The first, alone: text is generated on one device.
    one = DeviceManager(devices.devices[:1], devices.reason, devices.ledger)
    batch = data.evaluation.batch(0)
    # Where completions alone are learned, their ends are, too.
    prompts, end = _beginnings(batch), tokenizer.end if "loss_mask" in batch else None
    precision = Precision.create(experiment.precision)
    generators: list[Callable[..., Any]] = []  # Compiled at the first evaluation.

    def look(step: int, state: Any) -> Callable[[], None]:
        params = jax.tree.map(devices.fetch, trainer.merged(state)[0])
        params = one.replicate(precision.policy.cast_to_compute(params))
        if not generators:
            sizes = [flatten(params)[path].shape[0] for path in family.tables]
            model = LanguageModel(step, params, experiment.model, precision, *sizes)
            sampling = Sampling(0.8, vocabulary=tokenizer.size)
            generators.append(make_generate(one, model, sampling))
        streams = [tokenizer.stream() for _ in prompts]
        texts = [
            "".join(map(stream, prompt))
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        rows = generators[0](prompts, WRITTEN, params)
        columns = zip(*pieces(rows, streams, end), strict=True)
        written = [*map("".join, columns)] or [""] * len(prompts)
        return lambda: write(step, texts, written)

    def write(step: int, texts: list[str], written: list[str]) -> None:
        pairs = list(zip(texts, written, strict=True))
        lines = [{"step": step, "prompt": a, "text": b} for a, b in pairs]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        append_whole(workdir / "samples.jsonl", text.encode())
        # Indented, Markdown leaves them as they are.
        blocks = [f"    {a}|{b}".replace("\n", "\n    ") for a, b in pairs]
        summary = tensorboard.text("samples", "\n\n---\n\n".join(blocks))
        tensorboard.write(workdir, "samples", step, summary)

    return at_evaluations("samples", trainer, look)


def _beginnings(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """First tokens of the first texts: prompts, where completions alone are learned."""
    rows, ends = batch["inputs"][:PROMPTS], [BEGINNING] * PROMPTS
    if "loss_mask" in batch:
        ends = [int(mask.argmax()) + 1 for mask in batch["loss_mask"]]
    return [row[:n].tolist() for row, n in zip(rows, ends, strict=False)]

"""Hooks that a config names: `config.hooks = ("images", "histograms")`.

Each function is called with the trainer and the workdir, before the first step, and
returns a hook. Those here look at evaluations, and write files of the workdir and
TensorBoard's; an error is a warning. In several processes one before the writing ends
the run: a process that went on would leave the others waiting.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.devices import detached
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.reporting import plots, tensorboard
from haiku_template.runs.limits import FirstBatches
from haiku_template.runs.predictions import class_scores
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.files import dispensable
from haiku_template.training.trainer import Trainer

PICTURES = 16  # Examples that `images` draws.
HOOKS = {
    "histograms": "haiku_template.runs.hooks:histograms",
    "images": "haiku_template.runs.hooks:images",
    "samples": "haiku_text.samples:samples",
}


def at_evaluations(
    name: str, trainer: Trainer, look: Callable[[int, Any], Callable[[], None]]
) -> Callable[[Any], None]:
    """Makes a hook of `look(step, state)`, whose result writes, in process 0 alone."""
    processes = trainer.devices.processes

    def hook(event: Any) -> None:
        if event.what == "evaluation":
            # One of several processes must not leave out what the others wait for.
            with nullcontext() if processes.count > 1 else dispensable(f"hook {name}"):
                write = look(event.step, event.state)
                if processes.index == 0:
                    with dispensable(f"hook {name}"):
                        write()

    return hook


def histograms(trainer: Trainer, workdir: Path) -> Callable[[Any], None]:
    """Makes a hook that writes the distribution of each parameter to TensorBoard."""

    def look(step: int, state: Any) -> Callable[[], None]:
        leaves = flatten(trainer.devices.fetch(trainer.devices.gather(state.params)))
        values = [tensorboard.histogram(name, x) for name, x in leaves.items()]
        return lambda: tensorboard.write(workdir, "histograms", step, *values)

    return at_evaluations("histograms", trainer, look)


def images(trainer: Trainer, workdir: Path) -> Callable[[Any], None]:
    """Makes a hook that draws examples of the evaluation set, and what is predicted.

    They are images/STEP.png, 16 of the first batch. Raises `ConfigError` for inputs
    that are not [B, height, width, 1 or 3], or [B, height, width].
    """
    data = trainer.experiment.data
    batch = {} if data.evaluation is None else detached(data.evaluation.batch(0))
    pixels = np.asarray(batch.get("inputs", 0.0))
    pixels = pixels[..., None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or pixels.shape[-1] not in (1, 3):
        raise ConfigError(
            "config.hooks=images draws inputs [B, height, width, 1 or 3] of an "
            f"evaluation set, and here they are {list(pixels.shape)}"
        )
    pixels, labels = pixels[:PICTURES], batch.get("labels")

    def look(step: int, state: Any) -> Callable[[], None]:
        (outputs,) = trainer.predict(state, FirstBatches(data.evaluation, 1))
        titles = [*_titles(trainer, outputs, labels)][: len(pixels)]
        titles = titles or [""] * len(pixels)

        def draw() -> None:
            path = workdir / workdirs.IMAGES / f"{step}.png"
            path.parent.mkdir(exist_ok=True)
            if plots.write_pictures(path, pixels, titles):
                picture = tensorboard.picture("evaluation", path.read_bytes())
                tensorboard.write(workdir, "images", step, picture)

        return draw

    return at_evaluations("images", trainer, look)


def _titles(trainer: Trainer, outputs: Any, labels: Any) -> Iterator[str]:
    """`seven`, or `seven, not one`: the class predicted of examples, and the label."""
    names, scores = class_scores(trainer, outputs)
    for i in range(0 if scores is None else len(scores)):
        title = str(names[predicted := scores[i].argmax()])
        if np.shape(labels) == scores.shape[:1] and labels[i] != predicted:
            title += f", not {names[int(labels[i])]}"
        yield title

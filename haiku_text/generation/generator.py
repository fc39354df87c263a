"""Generator: a language model that continues prompts, with a KV cache."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, DamagedError, StorageError
from haiku_template.finetuning import check_readable, trains_a_part
from haiku_template.models.precision import Precision
from haiku_template.params import flatten
from haiku_template.runs import Run
from haiku_template.storage.checkpoint import Checkpoints, restore
from haiku_template.training import experiment
from haiku_text.generation.sampling import Sampling, make_steps

logger = logging.getLogger(__name__)

SHORTEST = 16  # Least tokens of a padded prompt.


class LanguageModel(NamedTuple):
    """A trained model on its device."""

    step: int
    params: hk.Params  # In the compute dtype; averaged if the run averages them.
    model: hk.Transformed  # `forward(tokens, is_training, cache)`, as `models.gpt`.
    precision: Precision
    vocabulary: int  # Number of tokens.
    context: int  # Largest number of tokens in a forward pass.


def load(run: Run) -> LanguageModel:
    """Reads the parameters of a checkpoint, and nothing else, to its one device.

    Those of a run with frozen parameters are merged. Raises `ConfigError` if there is
    no such checkpoint, its model does not generate, or there are several devices;
    `StorageError` if it is damaged, or does not fit.
    """
    config, devices = run.config, run.devices
    if devices.num_devices != 1:
        raise ConfigError(
            f"text is generated on one device, and {devices.num_devices} were asked "
            "for; use --num_devices=1, or name one as in --device=gpu:1"
        )
    name = f"config.model.name={config.model.name}" if config else "the model"
    if (family := run.family) is None or family.tables is None:
        raise ConfigError(
            f"{name} of the run in {run.workdir} is not a language model that "
            "text can be generated with; gpt is"
        )

    def sizes(params: hk.Params) -> list[int]:
        return [flatten(params)[path].shape[0] for path in family.tables]

    def read(checkpoints: Checkpoints, step: int) -> hk.Params:
        field = "ema_params" if checkpoints.saved(step).get("ema_params") else "params"
        vocabulary, _ = sizes(checkpoints.saved(step)[field])
        init = experiment.make_model(config, vocabulary).init
        tokens = np.zeros((1, 1), np.int32)
        shapes = devices.abstract(lambda: init(jax.random.key(0), tokens, False))
        return checkpoints.restore(step, devices.host_shapes(shapes), field)

    if config is None or trains_a_part(config.finetuning):
        step, params = run.step, run.parameters()[0]
    else:
        try:
            step, params = restore(run.workdir, run.which, read)
        except StorageError as error:
            if config.init_from is not None and not isinstance(error, DamagedError):
                check_readable(config.init_from)  # A folder has the model's sizes.
            raise
    vocabulary, context = sizes(params)  # Why: docs/decisions/generation.md#vocabulary
    if config is None:
        model, name = run.trainer.experiment.model, run.trainer.experiment.precision
    else:
        model, name = experiment.make_model(config, vocabulary), config.precision
    precision = Precision.create(name)
    cast = precision.policy.cast_to_compute
    params = jax.tree.map(lambda x: devices.replicate(cast(x)), devices.fetch(params))
    return LanguageModel(step, params, model, precision, vocabulary, context)


def make_generate(
    devices: DeviceManager, model: LanguageModel, sampling: Sampling
) -> Callable[[Sequence[Sequence[int]], int], Iterator[np.ndarray]]:
    """Makes `generate(prompts, num_tokens)`, which yields tokens [B] one by one.

    A third argument are other parameters than the model's, on the same device.

    A batch of prompts of different lengths gives the tokens that each alone would: at
    temperature 0 up to rounding, else with the row as a part of the seed. Two programs
    are compiled: prefill, for prompts padded to a power of two, and decode. When the
    context is full, prefill reads its second half again.

    Raises `ConfigError` if `sampling` does not fit; `generate` does if there is no
    prompt, or one is empty or has a token that the model has not.
    """
    _check(sampling, model.vocabulary)
    # Why: docs/decisions/generation.md#one-forward
    prefill, decode = make_steps(model.model, model.precision, sampling)
    prefill = devices.compile(prefill, donate_argnums=())
    decode = devices.compile(decode)
    context = model.context

    def generate(
        prompts: Sequence[Sequence[int]], num_tokens: int, params: Any = model.params
    ) -> Iterator[np.ndarray]:
        rows = [_fitting(prompt, model) for prompt in prompts]
        if not rows:
            raise ConfigError("there is no prompt; a model continues one or more")
        longest = max(map(len, rows))
        size = context
        if longest + num_tokens - 1 <= context:  # Else the whole context gets used.
            size = min(max(SHORTEST, 1 << (longest - 1).bit_length()), context)
        return write(params, rows, size, num_tokens)

    def write(
        params: Any, rows: list[list[int]], size: int, num_tokens: int
    ) -> Iterator[np.ndarray]:
        written, tokens = None, None
        for count in range(num_tokens):
            if written is None or max(map(len, rows)) > context:
                # Why: docs/decisions/generation.md#full-context
                tail = max(context // 2, 1)
                rows = [row[-tail:] if len(row) > context else row for row in rows]
                padded = [row + [0] * (size - len(row)) for row in rows]
                batch = {
                    "tokens": np.array(padded, np.int32),
                    "lengths": np.array([len(row) for row in rows], np.int32),
                    "count": np.full(len(rows), count, np.int32),
                }
                written, tokens = prefill(params, devices.shard(batch))
            else:
                written, tokens = decode(written, (params, tokens))
            new = devices.fetch(tokens)
            for row, token in zip(rows, new, strict=True):
                row.append(int(token))
            yield new

    return generate


def pieces(
    rows: Iterable[Any], streams: list[Callable[[int], str]], end: int | None
) -> Iterator[list[str]]:
    """Decodes a token of each text at a time, until all have come to their `end`."""
    left = dict(enumerate(streams))
    for tokens in rows:
        left = {i: stream for i, stream in left.items() if tokens[i] != end}
        if not left:
            return
        yield [left[i](int(x)) if i in left else "" for i, x in enumerate(tokens)]


def _fitting(prompt: Sequence[int], model: LanguageModel) -> list[int]:
    """Checks a prompt, and cuts its beginning if it is longer than the context."""
    if len(prompt) == 0:  # It may be an array.
        raise ConfigError("a prompt has no tokens; a model continues some text")
    for place, token in enumerate(prompt):
        if not 0 <= token < model.vocabulary:
            raise ConfigError(
                f"token {place} of the prompt is {token}, and the model has "
                f"{model.vocabulary} tokens, from 0"
            )
    if len(prompt) > model.context:
        logger.warning(
            "a prompt has %d tokens and the model sees %d at once: it continues "
            "the last %d",
            *(len(prompt), model.context, model.context),
        )
    return list(prompt[-model.context :])


def _check(sampling: Sampling, vocabulary: int) -> None:
    most = sampling.vocabulary or vocabulary
    if most > vocabulary:
        raise ConfigError(
            f"the tokenizer has {most} tokens and the model {vocabulary}; it is the "
            "tokenizer of another model"
        )
    if not 0 <= sampling.seed < 2**32:
        raise ConfigError(f"--seed={sampling.seed}; possible is 0 to 2**32 - 1")
    if not 0 <= sampling.temperature < float("inf"):
        raise ConfigError(
            f"--temperature={sampling.temperature}; possible is 0 or more"
        )
    if sampling.top_k is not None and not 1 <= sampling.top_k <= most:
        raise ConfigError(f"--top_k={sampling.top_k}; possible is 1 to {most}")

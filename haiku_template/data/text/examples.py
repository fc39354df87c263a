"""The data set `jsonl`: texts with labels, or prompts with completions.

{"text": "A fine film.", "label": "positive"}
{"prompt": "Capital of France?", "completion": " Paris"}
"""

from pathlib import Path

import numpy as np

from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.data.text.buckets import (
    BucketedDataset,
    BucketedEvaluationSet,
    Completions,
    Texts,
    Tokens,
    choose_lengths,
)
from haiku_template.data.text.jsonl import (
    Line,
    class_names,
    classes_of,
    labels_of,
    read_lines,
    split_lines,
)
from haiku_template.data.text.tokenizer import Tokenizer
from haiku_template.errors import ConfigError


def jsonl(
    spec: BatchSpec,
    *,
    path: str | None = None,
    tokenizer: str | None = None,
    context: int = 512,
    vocab_size: int | None = None,
    num_buckets: int = 4,
    truncate: bool = False,
    validation_path: str | None = None,
    validation_fraction: float = 0.1,
) -> Data:
    """JSON-lines: `text` and `label`, or `prompt` and `completion`.

    With the task `classification`, inputs are those of an encoder, the classes are the
    labels to train on, sorted. With `language_model`, tokens of prompt and completion
    follow each other, the end of a text follows them, and the loss is of the
    completion and of that end alone. Tokens are padded to one of few lengths. With a
    task of one's own the file says which of the two it is.

    Args:
      spec: how they are cut into batches, and for which task.
      path: the file.
      tokenizer: a tokenizer.json, or a folder with one; None means bytes of UTF-8.
      context: the longest inputs, in tokens: at most the model's positions.
      vocab_size: of the model; None means the tokenizer's.
      num_buckets: different lengths of batches, at most; each is compiled.
      truncate: cut what is longer than `context`, instead of refusing it: the end of a
        text, the beginning of a prompt and its completion.
      validation_path: evaluate on this file, and train on all of `path`.
      validation_fraction: else hold out this part of the lines, by a hash; 0 for none.

    Raises:
      ConfigError: see `read_lines`, `split_lines` and `class_names`; an example that is
        longer than `context`, or has nothing to learn from; a label that is only held
        out; a tokenizer with tokens that `vocab_size` does not have. Names the line.
    """
    if not path:
        raise ConfigError(
            "the data set jsonl needs a file with a JSON object in each line: "
            "--config.data.path=PATH (nothing is downloaded)"
        )
    if context < 1:
        raise ConfigError(f"context={context}; possible is 1 or more")
    file = Path(path).expanduser()
    labels = labels_of(file, spec.labels)
    training, held_out = read_lines(file, labels), []
    if validation_path is not None:
        held_out = read_lines(Path(validation_path).expanduser(), labels)
    else:
        training, held_out = split_lines(training, validation_fraction)
    coder = Tokenizer(tokenizer)
    if vocab_size is not None and vocab_size < coder.size:
        raise ConfigError(
            f"{coder.name} has {coder.size} tokens, and vocab_size={vocab_size}; the "
            "model must know all of them"
        )
    size = vocab_size or coder.size
    cut = context if truncate else None
    if labels == "classes":
        classes = class_names(training)
        num_outputs, names = len(classes), tuple(map(str, classes))
        parts = [_texts(part, coder, classes, cut) for part in (training, held_out)]
    else:
        num_outputs, names = size, ()
        parts = [_completions(part, coder, cut) for part in (training, held_out)]
    for part, lines in zip(parts, (training, held_out), strict=True):
        _check_sizes(part.sizes, lines, context)
    longest = max(part.sizes.max(initial=0) for part in parts)
    lengths = choose_lengths(parts[0].sizes, num_buckets, context, longest)
    train = BucketedDataset(parts[0], lengths, spec)
    evaluation = None
    if held_out:
        evaluation = BucketedEvaluationSet(parts[1], lengths, spec.batch_size)
    return Data(
        train,
        evaluation,
        num_outputs,
        text=coder.name,
        class_names=names,
        vocab_size=size,
    )


def _texts(
    lines: list[Line], tokenizer: Tokenizer, classes: dict, cut: int | None
) -> Texts:
    tokens = tokenizer.encode([line.text for line in lines], special=True, most=cut)
    return Texts(Tokens.create(tokens), np.array(classes_of(lines, classes), np.int32))


def _completions(
    lines: list[Line], tokenizer: Tokenizer, cut: int | None
) -> Completions:
    prompts = tokenizer.encode([line.text for line in lines], special=True)
    # What begins a text does not begin a completion.
    completions = tokenizer.encode([line.target for line in lines])
    end = [] if tokenizer.end is None else [tokenizer.end]
    # The end of the text before tells that an empty prompt is one.
    prompts = [prompt or end for prompt in prompts]
    whole = [p + c + end for p, c in zip(prompts, completions, strict=True)]
    for line, tokens, prompt in zip(lines, whole, prompts, strict=True):
        if len(tokens) < 2 or len(tokens) == len(prompt):
            raise ConfigError(
                f"{line.where} has nothing to learn from: its prompt has {len(prompt)} "
                f"tokens and its completion {len(tokens) - len(prompt)}"
            )
    before = [max(len(tokens) - (cut + 1), 0) if cut else 0 for tokens in whole]
    kept = [tokens[n:] for tokens, n in zip(whole, before, strict=True)]
    left = [max(len(p) - n, 0) for p, n in zip(prompts, before, strict=True)]
    return Completions(Tokens.create(kept), np.array(left, np.int64))


def _check_sizes(sizes: np.ndarray, lines: list[Line], context: int) -> None:
    if sizes.max(initial=0) > context:
        index = int(sizes.argmax())
        raise ConfigError(
            f"{lines[index].where} is the longest example, with {sizes[index]} tokens "
            f"for the model to see, and context={context}; cut it, raise context as "
            "far as the model has positions, or set config.data.truncate=True"
        )
    if len(sizes) and sizes.min() < 1:
        raise ConfigError(f"{lines[int(sizes.argmin())].where} has a text of no tokens")

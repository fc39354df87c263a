"""Data set `jsonl`: texts with labels, or prompts with completions.

{"text": "A fine film.", "label": "positive"}
{"prompt": "Capital of France?", "completion": " Paris"}
"""

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haiku_template.bounded import parse
from haiku_template.data.buckets import BucketedDataset, BucketedEvaluationSet
from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.data.files import data_path, read_with
from haiku_template.errors import ConfigError
from haiku_text.data import texts
from haiku_text.data.documents import hold_out, rank
from haiku_text.data.packing import PackedDataset
from haiku_text.data.texts import Completions, Texts, Tokens
from haiku_text.data.tokenizer import Tokenizer

# Keys by the kind of labels that a task needs; other keys of a line are not read.
KEYS = {
    "classes": {"text": (str, "text"), "label": (str | int, "text or a whole number")},
    "tokens": {"prompt": (str, "text"), "completion": (str, "text")},
}
TEXT = {"text": (str, "text")}  # To predict: without labels.
TASKS = {"classes": "classification", "tokens": "language_model"}  # For messages.
TASKS["texts"] = TASKS["classes"]


class Line(NamedTuple):
    """Example: its place, its text or prompt, and its label or completion."""

    where: str
    text: str
    target: Any = None


def jsonl(
    spec: BatchSpec,
    *,
    path: str | None = None,
    tokenizer: str | None = None,  # A tokenizer.json or its folder; None means bytes.
    context: int = 512,  # Longest inputs, in tokens: at most the model's positions.
    vocab_size: int | None = None,  # Of the model; None means the tokenizer's.
    num_buckets: int = 4,  # Most lengths of batches; each is compiled.
    packing: bool = False,  # Completions share windows of `context` tokens to train on.
    truncate: bool = False,  # Else what is longer than `context` is refused.
    validation_path: str | None = None,  # Evaluate on this, and train on all of `path`.
    validation_fraction: float = 0.1,  # Else hold out lines by a hash; 0 for none.
) -> Data:
    """Reads JSON-lines: `text` and `label`, or `prompt` and `completion`.

    For the task `classification`, inputs are an encoder's, and the classes are the
    labels to train on, sorted. For `language_model`, an input is prompt, completion and
    the end of a text, and the loss is of the last two. Others take either. `truncate`
    cuts the end of a text, or the beginning of a prompt and its completion. With
    `packing`, an example of a batch is a window; evaluation is of each line alone.
    """
    file = data_path(path, "jsonl", "a file with a JSON object in each line")
    if context < 1:
        raise ConfigError(f"context={context}; possible is 1 or more")
    rows = _read_rows(file)
    labels = _labels(rows, spec.labels)
    if packing and labels != "tokens":
        raise ConfigError(
            "packing=True is for prompts with completions, and the labels here are "
            f"{labels}; use packing=False"
        )
    training = [_line(*row, labels) for row in rows]
    if validation_path is not None:
        rows = _read_rows(Path(validation_path).expanduser())
        held_out = [_line(*row, labels) for row in rows]
    else:
        training, held_out = _split(training, validation_fraction)
    coder = Tokenizer(tokenizer)
    size = coder.size if vocab_size is None else vocab_size
    if size < coder.size:
        raise ConfigError(
            f"{coder.name} has {coder.size} tokens, and vocab_size={vocab_size}; the "
            "model must know all of them"
        )
    cut = context if truncate else None
    if labels == "classes":
        classes = _classes(training)
        num_outputs, names = len(classes), tuple(map(str, classes))
        encode = functools.partial(_texts, tokenizer=coder, classes=classes, cut=cut)
    else:
        num_outputs, names = size, ()
        encode = functools.partial(_completions, tokenizer=coder, cut=cut)
    examples, held_examples = encode(training), encode(held_out)
    _check_sizes(examples.sizes, training, context)
    _check_sizes(held_examples.sizes, held_out, context)
    longest = max(x.sizes.max(initial=0) for x in (examples, held_examples))
    lengths = texts.choose_lengths(examples.sizes, num_buckets, context, longest)
    if packing:
        train = PackedDataset(examples, context, spec)
    else:
        train = BucketedDataset(examples, lengths, spec)
    evaluation = BucketedEvaluationSet(held_examples, lengths, spec.batch_size)
    evaluation = evaluation if held_out else None
    data = Data(train, evaluation, num_outputs, text=coder.name, class_names=names)
    if labels == "classes":  # Padding is on the right.
        data = data._replace(preprocess=texts.with_lengths)
    most = lengths[-1] if cut is None else context
    read = functools.partial(_read_set, labels, encode, most, spec.batch_size)
    return data._replace(vocab_size=size, read=read)


def _read_set(
    labels: str, encode: Callable[..., Any], most: int, batch_size: int, path: Path
) -> BucketedEvaluationSet:
    """Reads new lines, in their order; texts to classify may have no label."""
    rows = _read_rows(path)
    if labels == "classes" and not any('"label"' in text for _, text in rows):
        labels = "texts"
    lines = [_line(*row, labels) for row in rows]
    examples = encode(lines)
    _check_sizes(examples.sizes, lines, most)
    return BucketedEvaluationSet(examples, (most,), batch_size)


def _read_rows(path: Path) -> list[tuple[str, str]]:
    try:
        text = read_with(path, Path.read_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} of {path} is not UTF-8 text: {error.reason}"
        ) from error
    lines = enumerate(text.split("\n"), 1)
    rows = [(f"line {n} of {path}", line) for n, line in lines if line.strip()]
    if not rows:
        raise ConfigError(f"{path} is empty; at least one example is needed")
    return rows


def _labels(rows: list[tuple[str, str]], labels: str) -> str:
    if labels in KEYS:
        return labels
    if labels == "numbers":
        tasks = f"{' and '.join(TASKS.values())}, and config.task.name is regression"
        raise ConfigError(f"JSON-lines are for the tasks {tasks}")
    try:
        return _kind(parse(rows[0][1])) or "classes"
    except (ValueError, TypeError):
        return "classes"  # `_line` tells what is wrong with it.


def _kind(keys: Iterable[str]) -> str | None:
    return next((kind for kind, x in KEYS.items() if x.keys() <= set(keys)), None)


def _line(where: str, text: str, labels: str) -> Line:
    try:
        values = parse(text)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise ConfigError(f"{where} is no JSON: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no JSON object but {text.strip()[:40]}")
    keys, kind = KEYS.get(labels, TEXT), _kind(values)
    if missing := " and no ".join(key for key in keys if key not in values):
        names = ", ".join(values) or "an empty object"
        demand = f"the task {TASKS[labels]} needs {' and '.join(keys)}"
        if kind:
            demand += f"; it is of the kind for config.task.name={TASKS[kind]}"
        raise ConfigError(f"{where} has no {missing}, only {names}; {demand}")
    for key, (types, description) in keys.items():
        if not isinstance(values[key], types) or isinstance(values[key], bool):
            raise ConfigError(
                f"{where} has {key}={json.dumps(values[key])}; {description} is needed"
            )
    return Line(where, *(values[key] for key in keys))


def _split(lines: list[Line], fraction: float) -> tuple[list[Line], list[Line]]:
    # JSON may spell half a surrogate pair, which UTF-8 has no bytes for.
    keys = [(rank(line.text.encode(errors="surrogatepass")),) for line in lines]
    alone = f"{lines[0].where} and all others have the same text, so that nothing can "
    return hold_out(lines, keys, fraction, alone + "be held out")


def _classes(lines: list[Line]) -> dict[Any, int]:
    where, _, first = lines[0]
    for line in lines:
        if type(line.target) is not type(first):
            raise ConfigError(
                f"{line.where} has the label {line.target!r} and {where} the label "
                f"{first!r}; all are text, or all whole numbers"
            )
    return {label: i for i, label in enumerate(sorted({x.target for x in lines}))}


def _texts(
    lines: list[Line], tokenizer: Tokenizer, classes: dict, cut: int | None
) -> Texts:
    has_labels = any(line.target is not None for line in lines)
    for where, _, label in lines:
        if has_labels and label not in classes:
            possible = ", ".join(map(str, list(classes)[:20]))
            raise ConfigError(
                f"{where} has the label {label!r}, which no example to train on has; "
                f"those have {possible}"
            )
    tokens = tokenizer.encode([line.text for line in lines], special=True, most=cut)
    if not has_labels:
        return Texts(Tokens.create(tokens), None)
    labels = [classes[line.target] for line in lines]
    return Texts(Tokens.create(tokens), np.array(labels, np.int32))


def _completions(
    lines: list[Line], tokenizer: Tokenizer, cut: int | None
) -> Completions:
    prompts = tokenizer.encode([line.text for line in lines], special=True)
    # What begins a text does not begin a completion.
    completions = tokenizer.encode([line.target for line in lines])
    end = [] if tokenizer.end is None else [tokenizer.end]
    examples, prompt_sizes = [], []
    for line, prompt, completion in zip(lines, prompts, completions, strict=True):
        prompt = prompt or end  # Of the text before: it tells that this one is empty.
        tokens = prompt + completion + end
        if len(tokens) < 2 or len(tokens) == len(prompt):
            sizes = f"{len(prompt)} tokens and its completion {len(completion + end)}"
            reason = f"has nothing to learn from: its prompt has {sizes}"
            raise ConfigError(f"{line.where} {reason}")
        before = max(len(tokens) - (cut + 1), 0) if cut else 0
        examples.append(tokens[before:])
        prompt_sizes.append(max(len(prompt) - before, 0))
    return Completions(Tokens.create(examples), np.array(prompt_sizes, np.int64))


def _check_sizes(sizes: np.ndarray, lines: list[Line], context: int) -> None:
    if (size := sizes.max(initial=0)) > context:
        raise ConfigError(
            f"{lines[sizes.argmax()].where} is the longest example, with {size} tokens "
            f"for the model to see, and context={context}; cut it, raise context as "
            "far as the model has positions, or set config.data.truncate=True"
        )
    if sizes.min(initial=1) < 1:
        raise ConfigError(f"{lines[sizes.argmin()].where} has a text of no tokens")

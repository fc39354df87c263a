"""Data set `jsonl`: texts with labels, prompts with completions, or texts alone.

{"text": "A fine film.", "label": "positive"}
{"prompt": "Capital of France?", "completion": " Paris"}
{"text": "Once upon a time"}

The same columns may be those of a CSV or Parquet file.
"""

import copy
import functools
import itertools
import json
import logging
import marshal
import shlex
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haiku_template.data.buckets import BucketedDataset, BucketedEvaluationSet
from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.data.files import data_path
from haiku_template.data.rows import Row, read_rows
from haiku_template.errors import ConfigError, counted, some
from haiku_text.data import texts
from haiku_text.data.documents import hold_out, rank
from haiku_text.data.packing import PackedDataset
from haiku_text.data.texts import Completions, Texts, Tokens
from haiku_text.data.tokenizer import BYTES, Tokenizer, batches

logger = logging.getLogger(__name__)

TASKS = {"classes": "classification", "tokens": "language_model"}  # For messages.
TASKS["texts"] = TASKS["classes"]
WHOLE = "text or a whole number"
CHATS = """; chats are read once they are texts, such as those that this writes: \
python -c "import json, sys; [print(json.dumps({{'prompt': \
''.join('{{role}}: {{content}}\\n'.format(**x) for x in chat[:-1]) + 'assistant:', \
'completion': ' ' + chat[-1]['content']}})) \
for x in sys.stdin for chat in [json.loads(x)['{name}']]]" \
< {path} > {texts}"""
data_file = functools.partial(
    data_path, name="jsonl", description="a file of JSON-lines, .csv or .parquet"
)


class Columns(NamedTuple):
    """Names of the columns; others are not read."""

    text: str
    text_pair: str | None
    label: str
    prompt: str | None  # None where texts alone are completions of nothing.
    completion: str

    def of_texts(self, values: dict[str, Any]) -> "Columns":
        """Columns of a language model's rows, which may be texts alone."""
        others = {self.label, self.prompt, self.completion}
        if self.text not in values or others & values.keys():
            return self
        return self._replace(prompt=None, completion=self.text)

    def of(self, kind: str) -> tuple[str, ...]:
        """Columns for a kind of labels that a task needs; `texts` has none."""
        if kind == "tokens":
            return (self.prompt, self.completion) if self.prompt else (self.completion,)
        inputs = (self.text, self.text_pair) if self.text_pair else (self.text,)
        return inputs if kind == "texts" else (*inputs, self.label)

    def kind(self, values: dict[str, Any]) -> str | None:
        """Kind of labels that a row has the columns for."""
        kinds = ("classes", "tokens")
        return next((x for x in kinds if values.keys() >= {*self.of(x)}), None)


class Line(NamedTuple):
    """Example: its place, text or prompt, label or completion, and second text."""

    where: str
    text: str
    target: Any = None
    pair: str | None = None


class Lines(Sequence[Line]):
    """Examples of a file, packed: as objects they take ten times the memory.

    What is unpacked is what this process packed.
    """

    def __init__(self, rows: Iterable[Row], columns: Columns, labels: str) -> None:
        packed, ends = bytearray(), array("q", [0])
        for row in rows:
            packed += marshal.dumps((row.place, *_values(row, columns, labels)))
            ends.append(len(packed))
        self._path, self._packed, self._ends = row.path, memoryview(packed), ends
        self._numbers = np.arange(len(ends) - 1)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Line:
        number = self._numbers[index]
        start, end = self._ends[number : number + 2]
        place, *values = marshal.loads(self._packed[start:end])
        return Line(f"{place} of {self._path}", *values)

    def select(self, is_part: np.ndarray) -> "Lines":
        """Lines where `is_part`, bool [N], is true."""
        lines = copy.copy(self)
        lines._numbers = self._numbers[is_part]
        return lines


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
    text: str = "text",  # Names of columns, or of keys in each line of JSON.
    text_pair: str | None = None,  # Of a second text, which the first is read with.
    label: str = "label",
    classes: Sequence[Any] = (),  # In the order of a head's outputs; else sorted.
    prompt: str = "prompt",
    completion: str = "completion",
) -> Data:
    """Reads JSON-lines, .csv or .parquet: texts with labels, prompts with completions.

    For the task `classification`, inputs are an encoder's, and the labels to train on,
    sorted or as `classes` has them, are the classes. For `language_model`, an input is
    prompt, completion and the end of a text, and the loss is of the last two; a file
    of texts alone has no prompts. Others take either. `truncate` cuts the end of a
    text, or the beginning of a prompt and its completion. With `packing`, an example of
    a batch is a window; evaluation is of each line alone. Pairs of texts are held out
    by the first.
    """
    file = data_file(path)
    columns = Columns(text, text_pair, label, prompt, completion)
    if context < 1:
        raise ConfigError(f"context={context}; possible is 1 or more")
    first = next(rows := read_rows(file, columns))
    labels = _labels(first, columns, spec.labels)
    columns = columns.of_texts(first.values) if labels == "tokens" else columns
    if packing and labels != "tokens":
        raise ConfigError(
            "packing=True is for prompts with completions, and the labels here are "
            f"{labels}; use packing=False"
        )
    training = Lines(itertools.chain([first], rows), columns, labels)
    if validation_path is not None:
        rows = read_rows(data_file(validation_path, key="validation_path"), columns)
        held_out = Lines(rows, columns, labels)
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
        numbers = _classes(training, classes)
        num_outputs, names = len(numbers), tuple(numbers)
        encode = functools.partial(_texts, tokenizer=coder, numbers=numbers, cut=cut)
    else:
        num_outputs, names = size, ()
        _warn_without_end(coder)
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
    held = BucketedEvaluationSet(held_examples, lengths, spec.batch_size)
    data = Data(train, held if held_out else None, num_outputs, class_names=names)
    if labels == "classes":  # Padding is on the right.
        data = data._replace(preprocess=texts.with_lengths)
    sizes = (context,) if cut else (lengths[-1], context)
    read = functools.partial(_read_set, labels, columns, encode, sizes, spec.batch_size)
    return data._replace(text=coder.name, vocab_size=size, read=read)


def _warn_without_end(coder: Tokenizer) -> None:
    if coder.end is None:
        logger.warning("%s ends no text: no completion learns its end", coder.name)


def _read_set(
    labels: str,
    columns: Columns,
    encode: Callable[..., Any],
    lengths: tuple[int, ...],
    batch_size: int,
    path: Path,
) -> BucketedEvaluationSet:
    """Reads new lines, in their order; texts to classify may have no label."""
    read = functools.partial(read_rows, path, columns)
    if labels == "classes" and not any(columns.label in row.values for row in read()):
        labels = "texts"
    examples = encode(lines := Lines(read(), columns, labels))
    _check_sizes(examples.sizes, lines, lengths[-1])
    length = min(x for x in lengths if x >= examples.sizes.max())  # One: in order.
    return BucketedEvaluationSet(examples, (length,), batch_size)


def _labels(first: Row, columns: Columns, labels: str) -> str:
    if labels in ("classes", "tokens"):
        return labels
    if labels == "numbers":
        tasks = f"{TASKS['classes']} and {TASKS['tokens']}"
        raise ConfigError(
            f"texts are for the tasks {tasks}, and config.task.name is regression"
        )
    return columns.kind(first.values) or "classes"  # `_values` tells what is wrong.


def _values(row: Row, columns: Columns, labels: str) -> tuple:
    """Text or prompt, label or completion, and second text of a row."""
    values, where = row.values, row.where
    names, kind = columns.of(labels), columns.kind(values)
    if missing := " and no ".join(name for name in names if name not in values):
        there = ", ".join(values) or "an empty object"
        demand = f"the task {TASKS[labels]} needs {' and '.join(names)}"
        if kind and kind != labels:
            demand += f"; it is of the kind for config.task.name={TASKS[kind]}"
        else:
            keys = [x for x, name in columns._asdict().items() if name in names]
            demand += f"; other columns are named by config.data.{', '.join(keys)}"
        demand += _of_chats(row) * (labels == "tokens")
        raise ConfigError(f"{where} has no {missing}, only {there}; {demand}")
    for name in names:
        is_label, value = labels == "classes" and name == names[-1], values[name]
        types, need = (str | int, WHOLE) if is_label else (str, "text")
        is_empty = is_label and value == ""
        if not isinstance(value, types) or isinstance(value, bool) or is_empty:
            shown = json.dumps(value, default=str) + f"; {need} is needed"
            chats = _of_chats(row) * (labels == "tokens")
            raise ConfigError(f"{where} has {name}={shown}{chats}")
    if labels == "tokens":
        return values[columns.prompt] if columns.prompt else "", values[names[-1]]
    pair = values[columns.text_pair] if columns.text_pair else None
    target = values[columns.label] if labels == "classes" else None
    return values[columns.text], target, pair


def _of_chats(row: Row) -> str:
    """Says how chats become prompts with completions; "" for a row that has none."""
    for name, value in row.values.items():
        first = value[0] if isinstance(value, list) and value else None
        is_chat = isinstance(first, dict) and first.keys() >= {"role", "content"}
        if is_chat and name.isidentifier():  # Others need quotes of the shell's.
            path = Path(row.path)
            texts = shlex.quote(str(path.with_name(f"{path.stem}.texts.jsonl")))
            return CHATS.format(name=name, path=shlex.quote(str(path)), texts=texts)
    return ""


def _split(lines: Lines, fraction: float) -> tuple[Lines, Lines]:
    strings = (line.text for line in lines)
    if not any(line.text for line in lines):  # Completions of nothing.
        strings = (str(line.target) for line in lines)
    # JSON may spell half a surrogate pair, which UTF-8 has no bytes for.
    ranks = (rank(text.encode(errors="surrogatepass")) for text in strings)
    ranks, places = np.unique(np.fromiter(ranks, float), return_inverse=True)
    alone = f"{lines[0].where} and all others have the same text, so that nothing can "
    is_held = hold_out(places, ranks, fraction, alone + "be held out")
    return lines.select(~is_held), lines.select(is_held)


def _classes(lines: Lines, order: Sequence[Any]) -> dict[str, int]:
    """Numbers of the classes by label, in this order; by default they are sorted."""
    where, _, first, _ = lines[0]
    for line in lines:
        if type(line.target) is not type(first):
            raise ConfigError(
                f"{line.where} has the label {line.target!r} and {where} the label "
                f"{first!r}; all are text, or all whole numbers"
            )
    labels = [*map(str, sorted({line.target for line in lines}))]
    names = [*dict.fromkeys(map(str, order))] or labels
    if lacks := [label for label in labels if label not in names]:
        raise ConfigError(f"classes={tuple(names)!r} lacks the labels {some(lacks)}")
    return {label: i for i, label in enumerate(names)}


def _batches(lines: Lines) -> Iterator[list[Line]]:
    return batches(lines, lambda line: sum(len(x) for x in line if isinstance(x, str)))


def _texts(lines: Lines, tokenizer: Tokenizer, numbers: dict, cut: int | None) -> Texts:
    labels, types = array("i"), bytearray()
    for line in lines:
        if line.target is None:
            break  # As in all.
        if str(line.target) not in numbers:
            possible = some(numbers, 20)
            raise ConfigError(
                f"{line.where} has the label {line.target!r}, which no example to "
                f"train on has; those have {possible}"
            )
        labels.append(numbers[str(line.target)])

    def encode() -> Iterator[list[int]]:
        for batch in _batches(lines):
            if batch[0].pair is None:  # As in all.
                first = [line.text for line in batch]
                yield from tokenizer.encode(first, special=True, most=cut)
                continue
            pairs = [(line.text, line.pair) for line in batch]
            tokens, kinds = tokenizer.encode_pairs(pairs, most=cut)
            types.extend(itertools.chain.from_iterable(kinds))
            yield from tokens

    tokens = _tokens(encode(), tokenizer)
    kinds = Tokens(np.frombuffer(types, np.uint8), tokens.starts) if types else None
    return Texts(tokens, np.array(labels, np.int32) if labels else None, kinds)


def _completions(lines: Lines, tokenizer: Tokenizer, cut: int | None) -> Completions:
    end = [] if tokenizer.end is None else [tokenizer.end]
    prompt_sizes = array("q")

    def encode() -> Iterator[list[int]]:
        for batch in _batches(lines):
            prompts = tokenizer.encode([line.text for line in batch], special=True)
            # What begins a text does not begin a completion.
            completions = tokenizer.encode([line.target for line in batch])
            for line, prompt, rest in zip(batch, prompts, completions, strict=True):
                prompt = prompt or end  # Of the text before: it tells it is empty.
                tokens = prompt + rest + end
                if len(tokens) < 2 or len(tokens) == len(prompt):
                    raise ConfigError(
                        f"{line.where} has nothing to learn from: its prompt has "
                        f"{counted(len(prompt), 'tokens')} and its completion "
                        f"{len(tokens) - len(prompt)}"
                    )
                before = max(len(tokens) - (cut + 1), 0) if cut else 0
                prompt_sizes.append(max(len(prompt) - before, 0))
                yield tokens[before:]

    tokens = _tokens(encode(), tokenizer)
    return Completions(tokens, np.array(prompt_sizes, np.int64))


def _tokens(texts: Iterable[list[int]], tokenizer: Tokenizer) -> Tokens:
    return Tokens.create(texts, np.uint8 if tokenizer.name == BYTES else np.int32)


def _check_sizes(sizes: np.ndarray, lines: Lines, context: int) -> None:
    if (size := sizes.max(initial=0)) > context:
        raise ConfigError(
            f"{lines[sizes.argmax()].where} is the longest example, with {size} tokens "
            f"for the model to see, and context={context}; cut it, raise context as "
            "far as the model has positions, or set config.data.truncate=True"
        )
    if sizes.min(initial=1) < 1:
        raise ConfigError(f"{lines[sizes.argmin()].where} has a text of no tokens")

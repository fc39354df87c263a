"""JSON-lines: one object a line, of one kind in a file; and a part held out of them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.data.text.documents import hold_out, rank
from haiku_template.errors import ConfigError

# Keys by the kind of labels that a task needs; other keys of a line are not read.
KEYS = {"classes": ("text", "label"), "tokens": ("prompt", "completion")}
TASKS = {"classes": "classification", "tokens": "language_model"}  # For messages.


class Line(NamedTuple):
    """One example.

    Attributes:
      where: the file and the number of the line, for errors.
      text: the text, or the prompt.
      target: the label, or the completion.
    """

    where: str
    text: str
    target: Any


def read_lines(path: Path, labels: str) -> list[Line]:
    """The examples of a file; empty lines are left out.

    Args:
      path: UTF-8 text.
      labels: a key of `KEYS`; see `labels_of`.

    Raises:
      ConfigError: the file is missing, not UTF-8 or empty, the task needs other data,
        or a line is no such example; the message names the first.
    """
    lines = [
        _line(f"line {number} of {path}", text, labels)
        for number, text in enumerate(_text(path).split("\n"), 1)
        if text.strip()
    ]
    if not lines:
        raise ConfigError(f"{path} is empty; at least one example is needed")
    return lines


def labels_of(path: Path, labels: str) -> str:
    """Key of `KEYS` that a task needs; for one that takes any, that of the file.

    Raises:
      ConfigError: the task needs other data; or as `read_lines`.
    """
    if labels in KEYS:
        return labels
    if labels == "numbers":
        raise ConfigError(
            f"JSON-lines are for the tasks {' and '.join(TASKS.values())}, and "
            "config.task.name is regression"
        )
    first = next((text for text in _text(path).split("\n") if text.strip()), "{}")
    try:
        keys = set(json.loads(first))
    except (ValueError, RecursionError, TypeError):
        keys = set()
    return next((k for k, v in KEYS.items() if set(v) <= keys), "classes")


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} of {path} is not UTF-8 text: {error.reason}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the data file {path} cannot be read: {error.strerror}"
        ) from error


def _line(where: str, text: str, labels: str) -> Line:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        words = getattr(error, "msg", "it is nested too deeply")
        raise ConfigError(f"{where} is no JSON: {words}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no JSON object but {text.strip()[:40]}")
    keys = KEYS[labels]
    missing = [key for key in keys if key not in values]
    if missing:
        other = next((k for k, v in KEYS.items() if set(v) <= values.keys()), None)
        hint = (
            f"; it is of the kind for config.task.name={TASKS[other]}" if other else ""
        )
        raise ConfigError(
            f"{where} has no {' and no '.join(missing)}, only "
            f"{', '.join(values) or 'an empty object'}; the task {TASKS[labels]} needs "
            f"{' and '.join(keys)}{hint}"
        )
    example = Line(where, *(values[key] for key in keys))
    possible = (str,) if labels == "tokens" else (str, int)
    for key, value, kinds in zip(keys, example[1:], ((str,), possible), strict=True):
        if not isinstance(value, kinds) or isinstance(value, bool):
            words = "text" if kinds == (str,) else "text or a whole number"
            raise ConfigError(
                f"{where} has {key}={json.dumps(value)}; {words} is needed"
            )
    return example


def split_lines(lines: list[Line], fraction: float) -> tuple[list[Line], list[Line]]:
    """Holds out lines by their text, or prompt; see `hold_out`."""
    # JSON may spell half a surrogate pair, which UTF-8 has no bytes for.
    texts = [line.text.encode(errors="surrogatepass") for line in lines]
    alone = f"{lines[0].where} and all others have the same text, so that nothing can "
    keys = [(rank(text),) for text in texts]
    return hold_out(lines, keys, fraction, alone + "be held out")


def class_names(lines: list[Line]) -> dict[Any, int]:
    """The number of each label, in the order of the labels.

    Raises:
      ConfigError: labels of two kinds.
    """
    first = lines[0]
    for line in lines:
        if type(line.target) is not type(first.target):
            raise ConfigError(
                f"{line.where} has the label {line.target!r} and {first.where} the "
                f"label {first.target!r}; all are text, or all whole numbers"
            )
    return {label: i for i, label in enumerate(sorted({x.target for x in lines}))}


def classes_of(lines: list[Line], names: dict[Any, int]) -> list[int]:
    """The number of each line's label.

    Raises:
      ConfigError: a label that was not found in the lines to train on.
    """
    for line in lines:
        if line.target not in names:
            raise ConfigError(
                f"{line.where} has the label {line.target!r}, which no example to "
                f"train on has; those have {', '.join(map(str, list(names)[:20]))}"
            )
    return [names[line.target] for line in lines]

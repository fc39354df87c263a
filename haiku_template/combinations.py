"""Combinations of values of a sweep: a config for each, and devices for processes."""

import ast
import copy
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from haiku_template import config
from haiku_template.errors import ConfigError


class Member(NamedTuple):
    """A combination of values."""

    workdir: Path
    config: ConfigDict


def combinations(
    base: ConfigDict, folder: Path, words: list[str], only: str | None = None
) -> list[Member]:
    """Makes a config for each combination of `KEY=VALUE,VALUE`, the last key fastest.

    With `only`, for the one of this name: a config takes longer than all names.
    Raises `ConfigError` for words of another form, no such name, and as `config.check`.
    """
    if not words:
        raise ConfigError(
            "a sweep needs keys with values, such as 'optimizer.learning_rate=1e-4,"
            "1e-3' seed=0,1"
        )
    config.to_dict(base)  # Raises for a value that is not saved, or not copied.
    choices = [_choices(word) for word in words]
    keys = [key for key, _ in choices]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice} is given twice; give all of its values in one word")
    last = [key.rpartition(".")[2] for key in keys]
    short = [
        x if last.count(x) == 1 else key for x, key in zip(last, keys, strict=True)
    ]
    by_name: dict[str, dict[str, tuple[str, Any]]] = {}
    for values in itertools.product(*(items for _, items in choices)):
        parts = [f"{x}={text}" for x, (text, _) in zip(short, values, strict=True)]
        name = re.sub(r"[^\w.,=+-]", "_", ",".join(parts))  # A folder's, no pattern.
        if name in by_name:
            raise ConfigError(f"two runs of the sweep have the same name, {name}")
        by_name[name] = dict(zip(keys, values, strict=True))
    if only is not None and only not in by_name:
        raise ConfigError(f"--only={only}; possible are {' '.join(by_name)}")
    names = by_name if only is None else [only]
    return [Member(folder / x, _config(base, x, by_name[x])) for x in names]


def _config(
    base: ConfigDict, name: str, values: dict[str, tuple[str, Any]]
) -> ConfigDict:
    """Makes the config of one combination: texts and values by key."""
    own = copy.deepcopy(base)  # With its references, which follow what is set.
    for key, (text, value) in values.items():
        try:
            config_path.set_value(key, own, value, accept_new_attributes=True)
        except (KeyError, TypeError, ValueError) as error:
            sentence = f"{key}={text} does not fit the config: {error}"
            raise ConfigError(sentence) from error
    if own.mirror:  # Of one run.
        own.mirror = str(Path(own.mirror, name))
    config.check(own)
    return own


def _choices(word: str) -> tuple[str, list[tuple[str, Any]]]:
    """Reads `KEY=VALUE,VALUE`: the key, and each value as text and as itself."""
    key, equals, text = word.removeprefix("config.").partition("=")
    if not equals or not key or not text or key.startswith("-"):
        raise ConfigError(
            f"{word!r} is not understood; possible is a key of the config with values, "
            "such as seed=0,1,2; flags come before the keys"
        )
    try:
        values = ast.literal_eval(f"[{text}]")  # Tuples among them.
    except config.NO_LITERAL:
        values = list(map(_literal, text.split(",")))
    texts = text.split(",")
    texts = texts if len(texts) == len(values) else list(map(str, values))
    return key, list(zip(texts, values, strict=True))


def _literal(text: str) -> Any:
    """Reads a value as a flag has it: Python's, `true`, `false`, or text."""
    try:
        return ast.literal_eval(text)
    except config.NO_LITERAL:
        return {"true": True, "false": False}.get(text, text)


def shares(device: str, count: int) -> list[str]:
    """Shares the devices that `--device` lists; "" leaves it as it is, on CPUs.

    Raises `ConfigError` where processes would have the same accelerators.
    """
    platform, colon, numbers = device.partition(":")
    cards = [number for number in numbers.split(",") if number]
    has_cards = any(Path("/dev").glob("nvidia[0-9]*"))
    if platform == "cpu" or (device == "auto" and not has_cards):
        return [""] * count
    if not colon or len(cards) < count:
        raise ConfigError(
            f"--parallel={count} needs a device for each process, and "
            f"--device={device} lists {len(cards)}; possible is "
            f"--device=gpu:{','.join(map(str, range(count)))}"
        )
    if len({card.strip().lstrip("0") for card in cards}) < len(cards):
        raise ConfigError(f"--device={device} names a device twice; name each once")
    return [f"{platform}:{','.join(cards[i::count])}" for i in range(count)]

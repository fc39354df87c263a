"""Hugging Face's config.json, to and from a model's keyword arguments."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.errors import ConfigError
from haiku_template.models import FAMILIES, Family

CONFIG = "config.json"


class Description(NamedTuple):
    """Model of a Hugging Face folder.

    Attributes:
      config: the content of config.json.
      arguments: keyword arguments of the family's function in `MODELS`. A BERT's leave
        out `num_outputs`, which is the task's, and `pooling`.
    """

    config: dict[str, Any]
    family: Family
    arguments: dict[str, Any]


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads a folder's config.json.

    Raises:
      ConfigError: it is missing, or no JSON object with a model_type.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text())
        if not isinstance(config["model_type"], str):
            raise TypeError("model_type is no text")
        return config
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist; the folder of a Hugging Face model has one"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged: it is no JSON object with a model_type"
        ) from error


def describe(folder: str | Path, expected: Family | None = None) -> Description:
    """Reads the model of a Hugging Face folder; `expected` None allows any family.

    Raises:
      ConfigError: config.json is missing or damaged, or its model is of another family,
        or has a setting that no family computes.
    """
    path, config = Path(folder) / CONFIG, read_config(folder)
    kind, architectures = config["model_type"], config.get("architectures") or []
    possible = FAMILIES if expected is None else {expected.model_type: expected}
    family = possible.get(kind)
    if family is None:
        raise ConfigError(
            f"{path} describes a model of type {kind!r}; possible are "
            f"{', '.join(possible)}" + " for this model" * (expected is not None)
        )
    if not set(map(str, architectures)) <= set(family.architectures):
        raise ConfigError(
            f"{path} describes the architecture {', '.join(map(str, architectures))}; "
            f"possible are {', '.join(family.architectures)}"
        )
    arguments = _arguments(path, config, family)
    for key, possible in family.fixed(config).items():
        value = config.get(key, possible[0])
        if value not in possible:
            raise ConfigError(
                f"{path} has {key}={value!r}, which a {kind} model here cannot "
                f"compute; possible is {' or '.join(map(repr, possible))}"
            )
    return Description(config, family, arguments)


def _arguments(path: Path, config: dict[str, Any], family: Family) -> dict[str, Any]:
    values = {}
    for name, key, default in family.keywords:
        value = config.get(key, default)
        accepted = int if isinstance(default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or value < 0:
            what = "whole number" if accepted is int else "number"
            raise ConfigError(
                f"{path} has {key}={value!r}; a {what} is needed, such as {default}"
            )
        values[name] = value
    return values


def to_config(family: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """Makes the config.json of a model made here, for other software to load it.

    `arguments` made the model; those left out have the family's defaults.
    """
    sizes = {
        keyword.key: arguments.get(keyword.name, keyword.default)
        for keyword in family.keywords
    }
    fixed = {key: possible[0] for key, possible in family.fixed(sizes).items()}
    return (
        {"model_type": family.model_type, "architectures": [family.architectures[0]]}
        | fixed
        | sizes
    )

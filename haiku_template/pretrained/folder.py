"""Hugging Face's config.json, to and from a model's keyword arguments."""

from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.errors import ConfigError
from haiku_template.models import FAMILIES, MODELS, Family
from haiku_template.pretrained.tensors import read_json
from haiku_template.registry import resolve

CONFIG = "config.json"


class Description(NamedTuple):
    """Model of a Hugging Face folder.

    `arguments` are those of the family's function in `MODELS`. A BERT's leave out
    `num_outputs`, which is the task's, and `pooling`.
    """

    config: dict[str, Any]  # The content of config.json.
    family: Family
    arguments: dict[str, Any]


def describe(folder: str | Path, expected: Family | None = None) -> Description:
    """Reads the model of a Hugging Face folder; `expected` None allows any family.

    Raises:
      ConfigError: config.json is missing or damaged, or its model is of another family,
        or has a setting that no family computes.
    """
    path = Path(folder) / CONFIG
    config = read_json(path, "model_type", str)
    kind = config["model_type"]
    known = FAMILIES if expected is None else {expected.model_type: None}
    if kind not in known:
        raise ConfigError(
            f"{path} describes a model of type {kind!r}; possible are "
            f"{', '.join(known)}" + " for this model" * (expected is not None)
        )
    family = expected or resolve("model", FAMILIES[kind], MODELS).family
    arguments = {}
    architectures = [str(name) for name in config.get("architectures") or []]
    if not set(architectures) <= set(family.architectures):
        raise ConfigError(
            f"{path} describes the architecture {', '.join(architectures)}; "
            f"possible are {', '.join(family.architectures)}"
        )
    for name, key, default in family.keywords:
        value = arguments[name] = config.get(key, default)
        accepted = int if isinstance(default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or value < 0:
            needed = "whole number" if accepted is int else "number"
            raise ConfigError(
                f"{path} has {key}={value!r}; a {needed} is needed, such as {default}"
            )
    for key, possible in family.fixed(config).items():
        value = config.get(key, possible[0])
        if value not in possible:
            raise ConfigError(
                f"{path} has {key}={value!r}, which a {kind} model here cannot "
                f"compute; possible is {' or '.join(map(repr, possible))}"
            )
    return Description(config, family, arguments)


def to_config(family: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """Makes the config.json of a model made here, for other software to load it.

    `arguments` made the model; those left out have the family's defaults.
    """
    kinds = {
        "model_type": family.model_type,
        "architectures": [family.architectures[0]],
    }
    sizes = {key: arguments.get(name, value) for name, key, value in family.keywords}
    fixed = {key: possible[0] for key, possible in family.fixed(sizes).items()}
    return kinds | fixed | sizes

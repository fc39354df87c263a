"""Folders of Hugging Face's models: config.json, and safetensors in its names."""

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import numpy as np

from haiku_template.bounded import is_file
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, counted, near
from haiku_template.models import Rule
from haiku_template.params import flatten, matching, unflatten
from haiku_template.pretrained import new_folder, read, save_tensors, tensors, to_json
from haiku_template.pretrained.rules import TRANSFORMS, find, tensor_name
from haiku_template.pretrained.tensors import read_json
from haiku_text.data.tokenizer import BYTES, FILE, Tokenizer
from haiku_text.models import bert, gpt
from haiku_text.models.bert import HEAD
from haiku_text.models.family import Family

logger = logging.getLogger(__name__)

CONFIG = "config.json"
FAMILIES: dict[str, Family] = {f.model_type: f for f in (gpt.family, bert.family)}
FORMAT = {"format": "pt"}  # transformers asks for it.
# Files copied beside the tensors: tokenizers, and the pooling of sentences.
BESIDE = ("*.json", "*.txt", "*.model", "*/config.json")
OF_TOKENIZER = re.compile("tokenizer|vocab|merges|special_|added_|generation_|.*model$")
Makers = dict[str, Callable[[], np.ndarray]]  # Functions that make tensors, by name.


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
    families = FAMILIES if expected is None else {expected.model_type: expected}
    if kind not in families:
        raise ConfigError(
            f"{path} describes a model of type {kind!r}; possible are "
            f"{', '.join(families)}" + " for this model" * (expected is not None)
        )
    family, arguments = families[kind], {}
    names = config.get("architectures") or []
    architectures = [*map(str, names if isinstance(names, list) else [names])]
    if not set(architectures) <= set(family.architectures):
        raise ConfigError(
            f"{path} describes the architecture {', '.join(architectures)}; "
            f"possible are {', '.join(family.architectures)}"
        )
    for name, key, default in family.keywords:
        value = arguments[name] = config.get(key, default)
        accepted = int if isinstance(default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted) or value < 0:
            number = "whole number" if accepted is int else "number"
            raise ConfigError(
                f"{path} has {key}={value!r}; a {number} is needed, such as {default}"
            )
    for key, possible in family.fixed(config).items():
        value = config.get(key, possible[0])
        if value not in possible:
            raise ConfigError(
                f"{path} has {key}={value!r}, which a {kind} model here cannot "
                f"compute; possible is {' or '.join(map(repr, possible))}"
            )
    return Description(config, family, arguments)


def check_classes(
    folder: str | Path, names: Sequence[str], fresh: Sequence[str]
) -> None:
    """Compares the classes of a classifier's head with those of the data.

    Raises `ConfigError` if they have another order, and warns of other names. A head
    that is `fresh`, patterns of paths, has none.
    """
    labels = describe(folder).config.get("id2label")
    is_new = any(matching(x, [f"{HEAD}/w"]) for x in fresh)
    if is_new or not isinstance(labels, dict):
        return
    order = [str(labels[k]) for k in sorted(labels, key=lambda k: (len(k), k))]
    fault = f"the classes of the head in {folder} are {order}"
    ours, theirs = ([x.casefold() for x in xs] for xs in (names, order))
    if sorted(ours) != sorted(theirs):
        if not all(map(str.isdecimal, names)):  # Which are the head's own numbers.
            logger.warning("%s, taken in this order for the data's %s", fault, names)
    elif ours != theirs:
        right = tuple(sorted(names, key=lambda name: theirs.index(name.casefold())))
        raise ConfigError(
            f"{fault}, and those of the data {names}, in another order; set "
            f'--config.data.classes="{right}"'
        )


def to_config(family: Family, arguments: dict[str, Any]) -> dict[str, Any]:
    """Makes the config.json of a model made here, for other software to load it.

    `arguments` made the model; those left out have the family's defaults.
    """
    first = family.architectures[0]
    kinds = {"model_type": family.model_type, "architectures": [first]}
    sizes = {key: arguments.get(name, value) for name, key, value in family.keywords}
    fixed = {key: possible[0] for key, possible in family.fixed(sizes).items()}
    return kinds | fixed | sizes


def restore(
    source: str | Path,
    init: Callable[[], hk.Params],
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    fresh: Sequence[str] = (),
) -> hk.Params:
    """Reads a model's parameters, and initializes those that match `fresh`.

    Args:
      source: a Hugging Face folder, or its index, or one safetensors file.
      init: makes the parameters of the model; those that are read are never made.
      fresh: patterns (as in a shell) of paths that no file has, as `bert/head/*`.

    Returns:
      The parameters, replicated, in the names, shapes and dtypes of `init`.

    Raises:
      ConfigError: the files cannot be read or do not fit, or a pattern fits nothing.
    """
    skeleton = devices.abstract(init)
    paths, fresh_paths = flatten(skeleton), set()
    for pattern in fresh:
        if not (fits := matching(pattern, paths)):
            fault = f"fresh={pattern!r} fits no parameter of the model"
            raise ConfigError(fault + near(pattern, paths))
        fresh_paths |= fits
    leaves = read(source, skeleton, rules, devices, skip=fresh_paths)
    init_fresh = lambda: {k: x for k, x in flatten(init()).items() if k in fresh_paths}  # noqa: E731
    # Compiled, so that what is not returned is not computed either.
    return unflatten(leaves | (devices.init(init_fresh) if fresh_paths else {}))


def export(
    folder: str | Path,
    params: hk.Params,
    family: Family,
    devices: DeviceManager,
    *,
    source: str | Path | None,
    arguments: dict[str, Any],
    class_names: Sequence[str],
    tokenizer: str | None = None,
) -> None:
    """Writes a model as the folder `source` that it started from, or a new one.

    `arguments` made the model, whose vocabulary need not be the source's; `tokenizer`
    takes the place of another one there. Raises as `export_like` and `export_new`, and
    `ConfigError` if transformers would compute something else from the classifier.
    """
    config = family.describe_classes(params, arguments, class_names)
    coder, files = tokenizer and Tokenizer(tokenizer), {}
    if coder and coder.name != BYTES:
        files[FILE] = Path(coder.name).read_bytes()
    if source is not None:
        beside = Path(source, FILE)
        is_same = is_file(beside) and beside.read_bytes() == files.get(FILE)
        files = None if is_same or not coder else files
    if family is gpt.family:
        config["vocab_size"] = arguments["num_outputs"]
        if files is not None:  # Else transformers takes GPT-2's own.
            config |= {"bos_token_id": None, "eos_token_id": coder and coder.end}
    write = functools.partial(export_like, source)
    if source is None:
        write, config = export_new, to_config(family, family.sizes(arguments)) | config
        if family is gpt.family:
            config |= {"embd_pdrop": config["resid_pdrop"], "attn_pdrop": 0.0}
    write(folder, params, family.rules, devices, config=config, files=files)


def export_like(
    source: str | Path,
    folder: str | Path,
    params: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    config: dict[str, Any] | None = None,
    files: dict[str, bytes] | None = None,
) -> None:
    """Writes parameters as the files that they were read from, changed or not.

    Each tensor keeps its name, but for `bert.` that a new head needs before it, dtype
    and file; half precision is warned of. Tensors that the model does not use are
    copied, and so are config.json and the tokenizer. New parameters, such as a head's,
    follow in the last file. Memory holds one file at a time.

    Args:
      source: the Hugging Face folder that was read.
      config: changes to config.json, such as the names of the labels.
      files: a tokenizer's by name, none of bytes, instead of the source's.

    Raises:
      ConfigError: `folder` exists, `source` cannot be read, no rule names one of the
        parameters, or the source's dtype cannot hold one.
      StorageError: the files cannot be written.
    """
    source, leaves = Path(source), flatten(params)
    located, headers = tensors.locate(source), tensors.read_headers(source)
    shards: dict[Path, Makers] = {tensor.file: {} for tensor in headers.values()}
    new_leaves, num_rounded = dict(leaves), Counter()

    def num_common(with_brackets: bool) -> int:
        names = (tensor_name(rules, path, with_brackets)[0] for path in leaves)
        return sum(name in headers for name in names)

    # New names have the prefix that may be missing, in brackets, if the others have.
    with_brackets = max((True, False), key=num_common)
    prefix = "" if with_brackets else _missing_prefix(headers, leaves, rules)
    for name, tensor in headers.items():
        rule, path = find(rules, name)
        make = functools.partial(tensors.read_tensor, tensor)
        if path in leaves:
            leaf, dtype = leaves[path], tensor.numpy_dtype
            make = functools.partial(_tensor, path, leaf, rule, dtype, devices)
            num_rounded[str(dtype)] += dtype.itemsize < leaf.dtype.itemsize
            new_leaves.pop(path, None)
        shards[tensor.file][prefix + name] = make
    for dtype, number in (+num_rounded).items():
        logger.warning(
            "%s written as %s, as in %s: what was trained in float32 is rounded to it",
            *(counted(number, "tensors"), dtype, source),
        )
    makers = _new_tensors(new_leaves, rules, devices, with_brackets or bool(prefix))
    [*shards.values()][-1].update(makers)
    files = {
        str(path.relative_to(source)): path.read_bytes()
        for pattern in BESIDE
        for path in source.glob(pattern)
        if is_file(path) and path.name != tensors.INDEX
        if files is None or not OF_TOKENIZER.match(path.name)
    } | (files or {})
    if config:
        old = read_json(source / CONFIG, "model_type", str)
        if (new := old | config) != old:
            files[CONFIG] = to_json(new)
    metadata = {file.name: tensors.read_metadata(file) for file in shards}
    if located.suffix == ".json":
        metadata[located.name] = tensors.read_index(located).get("metadata")
    shard_makers = {file.name: makers for file, makers in shards.items()}
    _write(Path(folder), shard_makers, files, located.name, metadata)


def export_new(
    folder: str | Path,
    params: hk.Params,
    rules: Sequence[Rule],
    devices: DeviceManager,
    *,
    config: dict[str, Any],
    files: dict[str, bytes] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes the parameters of a model made here, in Hugging Face's names.

    Args:
      config: the content of config.json, as from `to_config`.
      files: the content of others, by name.
      shard_bytes: the most that a file and host memory hold, unless one parameter has
        more.

    Raises:
      ConfigError: `folder` exists, or no rule names one of the parameters.
      StorageError: the files cannot be written.
    """
    leaves = flatten(params)
    groups, room = [{}], shard_bytes
    makers = _new_tensors(leaves, rules, devices)
    for (name, make), leaf in zip(makers.items(), leaves.values(), strict=True):
        if leaf.nbytes > room and groups[-1]:
            groups.append({})
            room = shard_bytes
        groups[-1][name] = make
        room -= leaf.nbytes
    total, located = len(groups), tensors.INDEX
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if total == 1:
        names, located = [tensors.SINGLE], tensors.SINGLE
    shards = dict(zip(names, groups, strict=True))
    files = (files or {}) | {CONFIG: to_json(config)}
    _write(Path(folder), shards, files, located, dict.fromkeys(names, FORMAT))


def _missing_prefix(
    names: Iterable[str], leaves: dict[str, Any], rules: Sequence[Rule]
) -> str:
    """Prefix that names without it need beside a new head: `bert.`; else nothing.

    transformers takes a file for a task's model by a head, or for a model alone.
    """
    old = {find(rules, name)[1] for name in names}
    new_rules = filter(None, (tensor_name(rules, x)[1] for x in leaves.keys() - old))
    if all("[" in rule.pattern for rule in new_rules):
        return ""
    prefixes = (re.match(r"\[(.*?)\]", rule.pattern) for rule in rules)
    return next((prefix[1] for prefix in prefixes if prefix), "")


def _new_tensors(
    leaves: dict[str, Any],
    rules: Sequence[Rule],
    devices: DeviceManager,
    with_brackets: bool = True,
) -> Makers:
    """Functions that make the tensors of parameters, in the parameters' order."""
    makers, nameless = {}, []
    for path, leaf in leaves.items():
        name, rule = tensor_name(rules, path, with_brackets)
        if name is None:
            nameless.append(path)
        makers[name] = functools.partial(_tensor, path, leaf, rule, leaf.dtype, devices)
    if nameless:
        raise ConfigError(
            f"the rename table names no tensor for {', '.join(nameless)}; nothing was "
            "written"
        )
    return makers


def _tensor(
    path: str, leaf: Any, rule: Rule, dtype: np.dtype, devices: DeviceManager
) -> np.ndarray:
    values = devices.fetch(leaf)
    with np.errstate(over="ignore"):
        array = np.asarray(TRANSFORMS[rule.transform](values), dtype, order="C")
    if dtype != leaf.dtype and np.isfinite(values).all() > np.isfinite(array).all():
        raise ConfigError(
            f"{path} has values up to {np.abs(values).max():.3g}, which {dtype}, its "
            "dtype in the folder that was read, cannot hold; nothing was written"
        )
    return array


def _write(
    folder: Path,
    shards: dict[str, Makers],
    files: dict[str, bytes],
    located: str,
    metadata: dict[str, dict[str, Any] | None],
) -> None:
    """Writes a new folder, all of it or nothing; raises as `new_folder`.

    Args:
      shards: functions that make the tensors, by file and name.
      files: the content of other files, by name.
      located: name of the only file of tensors, or of their index.
      metadata: of the files of tensors and of the index, by name.
    """
    size, places = 0, {}
    with new_folder(folder) as partial:
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        for name, makers in shards.items():
            arrays = {tensor: make() for tensor, make in makers.items()}
            save_tensors(partial / name, arrays, metadata.get(name))
            size += sum(array.nbytes for array in arrays.values())
            places |= dict.fromkeys(arrays, name)
            arrays.clear()  # Memory holds one file at a time.
        if located not in shards:
            facts = metadata.get(located) or {}
            if facts.get("total_size") != size:
                facts = {"total_size": size}
            index = {"metadata": facts, "weight_map": places}
            (partial / located).write_bytes(to_json(index))

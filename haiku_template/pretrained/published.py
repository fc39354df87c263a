"""Published files of any format: parameters and network state, checked and read.

A leaf's path is its module and its name, `state:` before it in the network state.
"""

import fnmatch
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from haiku_template.bounded import is_dir, is_file
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, near, some
from haiku_template.params import flatten, matching, unflatten
from haiku_template.pretrained import npz
from haiku_template.pretrained.reading import load
from haiku_template.pretrained.rules import SAME_NAMES, Rule, match
from haiku_template.pretrained.tensors import Tensor, convert_command, read_headers

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)  # A start may read a file twice.

BESIDE = "state.safetensors"  # Network state, beside the parameters' file.
MARK = "state:"  # Why: docs/decisions/finetuning.md#slashes
SHOWN = 8  # Names in a sentence.
# Keys of parameters, and of the network state beside them, as files have them.
SECTIONS = {"params": ("state", "net_state", "hk_state", "haiku_state"), "0": ("1",)}
WILDCARD = re.compile(r"(\*|\?|\[[!^]?\]?[^\]]*\])")
GROUPS = {"*": "(.*)", "?": "(.)"}


class Names(NamedTuple):
    """Differences of names in a file from the model's; patterns as in a shell."""

    rename: Sequence[tuple[str, str]] = ()  # A file's names, and the model's.
    ignore: Sequence[str] = ()  # May be left over in the file.
    fresh: Sequence[str] = ()  # Leaves of the state that need not be in the file.


def list_tensors(source: Path) -> Iterable[Tensor]:
    """Lists the tensors of a file, or of a folder of Hugging Face's."""
    if npz.is_archive(source):
        return npz.read_headers(source)
    return read_headers(source).values()


def read_published(
    source: Path,
    shapes: hk.Params,
    skip: Collection[str],
    state: hk.State | None,
    place: Callable[[str, Any], Any] | None = None,
    *,
    devices: DeviceManager,
    rules: Sequence[Rule],
    names: Names,
    list_tensors: Callable[[Path], Iterable[Tensor]] = list_tensors,
) -> tuple[dict[str, jax.Array], hk.State | None]:
    """Reads parameters and network state: all that fit the shapes, or none.

    Args:
      source: a safetensors file, a folder of Hugging Face's, `.npz`; or a folder whose
        tensors `list_tensors` lists.
      skip: paths of parameters that are left out.
      state: shapes of the network state; None leaves it out.
      place: puts a path's array on the devices; None replicates it, as state is.
      rules: of names that are not Haiku's.

    Returns:
      Parameters by path, and state; None where there is none to read.

    Raises `ConfigError` if the file is damaged or a pickle, or names, shapes or dtypes
    of parameters and state do not fit: lists every one.
    """
    marked = {MARK + path: x for path, x in flatten(state or {}).items()}
    expected = flatten(shapes) | marked
    fresh = [path for path in expected if _fits(path, names.fresh)]
    # Frozen parameters are read without it, and none of them is fresh.
    if fresh and state is not None:
        text = "%s: config.finetuning.fresh starts %s from the seed: %s"
        fact = f"{len(fresh)} of {len(expected)} leaves"
        _warn_once(text, source, fact, some(fresh, SHOWN))
    tensors = _by_path(source, list_tensors(source), shapes)
    beside = (source if is_dir(source) else source.parent) / BESIDE
    may_have = state is None or state  # Patterns may be of what a pass leaves out.
    if may_have and not any(map(_is_state, tensors)) and is_file(beside):
        tensors |= {MARK + path: x for path, x in read_headers(beside).items()}
    if state and not any(map(_is_state, tensors)):
        logger.warning(
            "network state starts afresh, not as it was trained: %s is not there, "
            "which would give %s",
            *(beside, ", ".join(list(flatten(state))[:4])),
        )
        state, expected = None, flatten(shapes)
    ignored = _fitting("ignore", names.ignore, tensors)
    old_names = _rename(tensors, names)
    tensors = {new: tensors[old] for new, old in old_names.items()}
    ignored = {new for new, old in old_names.items() if old in ignored}
    if state is None:
        tensors = {path: x for path, x in tensors.items() if not _is_state(path)}
    else:
        _fitting("fresh", [*filter(_is_state, names.fresh)], marked)
    left_out = {*skip, *filter(_is_state, fresh)}
    expected = {path: x for path, x in expected.items() if path not in left_out}
    matches = match(tensors, expected, [*rules, SAME_NAMES], left_out, ignored)

    def put(path: str, array: np.ndarray) -> Any:
        as_state = place is None or _is_state(path)
        return devices.replicate(array) if as_state else place(path, array)

    leaves = load(matches, expected, put)
    of_state = {k.removeprefix(MARK): leaves.pop(k) for k in [*leaves] if _is_state(k)}
    return leaves, None if state is None else unflatten(of_state)


def names_of_file(
    source: Any, params: hk.Params
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Maps a model's paths to those of the file that it was read from.

    Returns these, and the tensors of the file by its paths; neither if `source` is
    not a `functools.partial` of `read_published`, or of Hugging Face's names.
    """
    if getattr(source, "func", None) is not read_published or source.keywords["rules"]:
        return {}, {}
    file, names = source.args[0], source.keywords["names"]
    listed = source.keywords.get("list_tensors", list_tensors)(file)
    tensors = _by_path(file, listed, params)
    return _rename(tensors, names), tensors


def _by_path(
    source: Path, listed: Iterable[Tensor], shapes: hk.Params
) -> dict[str, Tensor]:
    """Lists tensors by path: names are joined by `/`, for `//` and `:` too."""
    tensors, paths = {}, flatten(shapes)
    for tensor in listed:
        path = tensor.name.replace("//", "/").replace(":", "/")
        path = tensor.name if tensor.name in paths else path
        if path in tensors:
            raise ConfigError(
                f"{source} holds {tensors[path].name} and {tensor.name}, which are one "
                f"path, {path}"
            )
        tensors[path] = tensor
    tensors = _without_sections(source, tensors, shapes)
    if pickled := [x.name for x in tensors.values() if x.dtype == "object"]:
        raise ConfigError(
            f"{source} holds {pickled[0]} as a pickle, which can run any code and is "
            f"not read here; this runs none:\n    {convert_command(source)}"
        )
    return tensors


def _without_sections(
    source: Path, tensors: dict[str, Tensor], shapes: hk.Params
) -> dict[str, Tensor]:
    """Takes the parameters and the state of a file that holds more, such as a config.

    A model with a module that is called like a section has none.
    """
    tops = dict.fromkeys(path.partition("/")[0] for path in tensors)
    modules = {module.partition("/")[0] for module in shapes}
    params = next((key for key in SECTIONS if key in tops and key not in modules), None)
    if params is None:
        return tensors
    state = next((key for key in SECTIONS[params] if key in tops), None)
    if other_keys := [key for key in tops if key not in (params, state)]:
        text = "%s holds more than parameters and network state, which is not read: %s"
        _warn_once(text, source, ", ".join(other_keys))
    split_paths = [(path.partition("/"), x) for path, x in tensors.items()]
    marks = {params: "", state: MARK}
    return {marks[top] + path: x for (top, _, path), x in split_paths if top in marks}


def _is_state(path: str) -> bool:
    return path.startswith(MARK)


def _fits(path: str, patterns: Iterable[str]) -> bool:
    """Tests patterns on a path, and on that of the state without its mark."""
    return any(matching(x, (path, path.removeprefix(MARK))) for x in patterns)


def _fitting(key: str, patterns: Sequence[str], paths: Collection[str]) -> set[str]:
    for pattern in patterns:
        if not any(_fits(path, [pattern]) for path in paths):
            guess = near(pattern, paths) or f"; they are {some(paths, SHOWN)}"
            raise ConfigError(
                f"config.finetuning.{key}: the pattern {pattern!r} fits none of the "
                f"{len(paths)} that there are{guess}"
            )
    return {path for path in paths if _fits(path, patterns)}


def _rename(paths: Collection[str], names: Names) -> dict[str, str]:
    """Maps new names to those of the file: the first rule that fits counts."""
    _fitting("rename", [old for old, _ in names.rename], paths)
    parsed, sources = [_parse(*pair) for pair in names.rename], {}
    for path in paths:
        mark, bare = MARK * _is_state(path), path.removeprefix(MARK)
        fits = ((x.fullmatch(bare) or x.fullmatch(path), new) for x, new in parsed)
        match_, template = next((pair for pair in fits if pair[0]), (None, ""))
        new = template.format(*match_.groups()) if match_ else bare
        new = mark + new.removeprefix(mark)
        if new in sources:
            raise ConfigError(
                f"config.finetuning.rename gives {sources[new]} and {path} one name, "
                f"{new}"
            )
        sources[new] = path
    return sources


def _parse(old: str, new: str) -> tuple[re.Pattern, str]:
    pieces, targets = WILDCARD.split(old), WILDCARD.split(new)
    if pieces[1::2] != targets[1::2]:
        raise ConfigError(
            f"config.finetuning.rename: ({old!r}, {new!r}) has other wildcards in its "
            "new name; each is carried over, in order, such as ('old/*', 'new/*')"
        )
    pieces[::2] = map(re.escape, pieces[::2])
    pieces[1::2] = [GROUPS.get(x) or _group(x) for x in pieces[1::2]]
    plain = [text.replace("{", "{{").replace("}", "}}") for text in targets[::2]]
    return re.compile("".join(pieces)), "{}".join(plain)


def _group(characters: str) -> str:
    """Group of one of some characters, as `matching` has them: `[ab]`, `[!ab]`."""
    pattern = fnmatch.translate(characters.replace("[^", "[!"))
    return f"({pattern.removeprefix('(?s:')[:-3]})"  # Without its end.

"""Export of NumPy archives in the names that a publisher's own loader reads."""

import functools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haiku as hk
import numpy as np

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.pretrained import npz
from haiku_template.pretrained.published import MARK, names_of_file
from haiku_template.pretrained.tensors import read_tensor
from haiku_template.pretrained.writing import new_file

# Forms of a name in a file: of a parameter's module and name, and of network state's.
FORMS = {
    "haiku": ("{}/{}", None),
    "alphafold": ("{}//{}", None),
    "graphcast": ("params:{}:{}", "state:{}:{}"),
}


def export_npz(
    file: Path,
    leaves: dict[str, Any],
    params: hk.Params,
    source: Any,
    devices: DeviceManager,
    form: str,
) -> None:
    """Writes parameters and network state to a new archive, one array at a time.

    bfloat16 becomes float32: NumPy has none.

    Args:
      leaves: by path, `MARK` before those of the state.
      params: the parameters, whose modules tell if their file has sections.
      source: what read them; leaves that came from a published file get the names that
        they have there, and what else is in that file is copied.
      form: of the names, one of `FORMS`.

    Raises:
      ConfigError: `file` exists, or the form has no names for network state.
      StorageError: it cannot be written; nothing of it is left.
    """
    # Why: docs/decisions/models.md#export-names
    renamed, there = names_of_file(source, params)
    makers: dict[str, Callable[[], np.ndarray]] = {
        _name(path, form): functools.partial(read_tensor, x)
        for path, x in there.items()
    }
    for name, leaf in _named(leaves, renamed, form).items():
        makers[name] = functools.partial(devices.fetch, leaf)
    with new_file(file) as partial, zipfile.ZipFile(partial, "w") as archive:
        for name, make in makers.items():
            array = np.asarray(make())
            array = array.astype(np.float32) if array.dtype.kind == "V" else array
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        # A form with sections has room for more, which its loader asks for.
        files = {x.file for x in there.values()} if FORMS[form][1] else set()
        for archived in filter(npz.is_archive, files):
            _copy_others(archived, archive, {x.name for x in there.values()})


def _named(
    leaves: dict[str, Any], renamed: dict[str, str], form: str
) -> dict[str, Any]:
    """Leaves by their names in the file; raises `ConfigError` if two have one name."""
    paths: dict[str, str] = {}
    for path in leaves:
        name = _name(renamed.get(path, path), form)
        if (other := paths.setdefault(name, path)) != path:
            raise ConfigError(
                f"{other} and {path} would both be {name} in the file, as "
                "config.finetuning.rename names them; give them names apart"
            )
    return {name: leaves[path] for name, path in paths.items()}


def _name(path: str, form: str) -> str:
    of_params, of_state = FORMS[form]
    template = of_state if path.startswith(MARK) else of_params
    if template is None:
        raise ConfigError(
            f"names of {form} have no place for network state, such as "
            f"{path.removeprefix(MARK)}; --names=graphcast has one, state:MODULE:NAME"
        )
    module, slash, name = path.removeprefix(MARK).rpartition("/")
    return template.format(module, name) if slash else name  # An archive's own.


def _copy_others(source: Path, archive: zipfile.ZipFile, names: set[str]) -> None:
    """Copies an archive's entries that are no parameter or state, such as a config."""
    plain = [x.name for x in npz.read_headers(source) if x.dtype != "object"]
    members = [f"{name}.npy" for name in plain if name not in names]
    with zipfile.ZipFile(source) as old:
        for x in members:
            try:
                data = old.read(x)
            except npz.DAMAGE as error:
                raise ConfigError(f"{source}: {x} is damaged: {error}") from error
            archive.writestr(zipfile.ZipInfo(x), data)  # Of no time.

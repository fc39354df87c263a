"""Trust: what a saved config may import, for others may have written it.

A name in it is a name of code. It is imported from the current directory, or from what
the user trusts, and never from a workdir, from Python or from its packages, whose
functions run whatever a keyword argument says. Why: docs/decisions/house.md#trust
"""

import functools
import inspect
import logging
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import machinery
from pathlib import Path
from typing import Any

from haiku_template.bounded import at_home, exists
from haiku_template.errors import ConfigError

# Once in a process: commands read a run's config before they open it.
warn_once = functools.cache(logging.getLogger(__name__).warning)
FINDERS = (machinery.BuiltinImporter, machinery.FrozenImporter, machinery.PathFinder)
OURS = (Path(__file__).parent, Path(__file__).parents[1] / "haiku_text")
SITES = {"site-packages", "dist-packages"}
VENV = "pyvenv.cfg"  # In the folder of a virtual environment.
WAYS = (Path.absolute, Path.resolve)  # A link may lie on either side.


def check_files(
    key: str, name: str, workdir: Path, roots: Iterable[str] = ()
) -> list[Path]:
    """Asserts that importing a name runs nothing but trusted files, and returns them.

    Nothing is run here. `roots` are paths and modules that the user trusts beside the
    current directory. Files of this project are not among them. Raises `ConfigError` if
    there is no such module, or a file of it is not trusted.
    """
    setting, module = f"config.{key}={name!r} of {workdir}", name.partition(":")[0]
    files, trusted = files_of(module), [*_roots(roots)]
    if not files and not (module == "__main__" in sys.modules):
        raise ConfigError(
            f"{setting} cannot be imported from here: {module} is no file of yours; "
            "run the command in its folder"
        )
    for file in files:
        if _is_inside(file, workdir):
            raise ConfigError(
                f"{setting} is inside that very directory ({file}); a run's code is "
                "imported only from where the command is run, never from a workdir: "
                "others may have written it"
            )
        if _is_ours(file):
            continue
        if not _is_trusted(file, trusted):
            top = module.partition(".")[0]
            advice = f"; if you know all code there, --trust={top} adds it (in Python "
            advice += f"Run.open(..., trust=[{top!r}]))"
            raise ConfigError(
                f"{setting} is {file}, and was not imported: others may have written "
                "what a workdir names, so that it is imported from the current "
                f"directory ({Path.cwd()}) alone"
                f"{'' if top in sys.stdlib_module_names else advice}"
            )
    return [file for file in files if not _is_ours(file)]


def check_definition(
    key: str, name: str, function: Any, table: Iterable[Any], roots: Iterable[str] = ()
) -> None:
    """Asserts that a function was written in a trusted file, and not imported there.

    Otherwise `mine:Popen` were a name, where `mine` imports that. Of this project only
    what `table` holds is allowed, and objects such as a user's `Task`. Raises
    `ConfigError` if it was written elsewhere.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if any(_is_entry(entry, name, function) for entry in table):
        return
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    home = getattr(function if is_code else type(function), "__module__", None)
    if (file := _file(home)) is None:
        allowed = home == "__main__"  # An interactive session's.
    elif _is_ours(file):
        allowed = not is_code
    else:
        allowed = _is_trusted(file, [*_roots(roots)])
    if not allowed:
        raise ConfigError(
            f"config.{key}={name!r} is of {home}, which {name.partition(':')[0]} only "
            "imports, and was not called: others may have written what a workdir "
            "names; possible are functions that a file of the current directory defines"
        )


def _is_entry(entry: Any, name: str, function: Any) -> bool:
    # MODULE:NAME, imported when asked for.
    if isinstance(entry, str) and entry != name:
        module, _, attribute = entry.partition(":")
        entry = getattr(sys.modules.get(module), attribute, None)
    return entry is function or entry == name


def files_of(module: str) -> list[Path]:
    """Finds the files that importing a module would run, without running any.

    None if a part of it is not found, or is built into Python.
    """
    if module == "__main__":  # It runs already.
        return [*filter(None, [_file(module)])]
    path, name, files = None, "", []
    for identifier in module.split("."):
        name = f"{name}.{identifier}".lstrip(".")
        # Others' finders last: one of setuptools' imports it in order to find.
        specs = (x.find_spec(name, path) for x in (*FINDERS, *sys.meta_path))
        spec = next(filter(None, specs), None) if identifier.isidentifier() else None
        path = spec and spec.submodule_search_locations
        if spec is None or (path is None and not spec.has_location):
            return []
        files += [Path(spec.origin)] if spec.has_location else []
    return files


def _file(module: str | None) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def _roots(names: Iterable[str]) -> Iterator[Path]:
    """Folders and files of `--trust`; raises `ConfigError` for what is not there."""
    for name in map(str, names):
        path, files = at_home(name), files_of(name)
        if not files and not exists(path):
            raise ConfigError(
                f"--trust={name} is neither a path nor a module that is found from "
                f"{Path.cwd()}"
            )
        if exists(path):
            yield path
        if files:
            yield files[-1].parent if files[-1].stem == "__init__" else files[-1]


def _is_trusted(file: Path, roots: Iterable[Path]) -> bool:
    here = Path.cwd()
    if _is_inside(file, here) and not _is_installed(file, here, Path("/")):
        return True
    return any(_is_inside(file, x) and not _is_installed(file, x, x) for x in roots)


def _is_installed(file: Path, root: Path, top: Path) -> bool:
    """Tests for a file of Python or its packages in a folder below `top`.

    Or of a virtual environment below `root`, as may lie in a project.
    """
    folders = _python_folders()
    for way in WAYS:
        parents = way(file).parents
        below = [folder for folder in parents if way(top) in folder.parents]
        inner = [folder for folder in parents if way(root) in folder.parents]
        if any(folder.name in SITES or folder in folders for folder in below):
            return True
        if any(exists(folder / VENV) for folder in inner):
            return True
    return False


@functools.cache
def _python_folders() -> set[Path]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    names = [*site.getsitepackages(), site.getusersitepackages()]
    names += [sysconfig.get_path(kind) for kind in kinds]
    return {way(Path(name)) for name in names for way in WAYS}


def _is_inside(file: Path, folder: Path) -> bool:
    return any(way(file).is_relative_to(way(folder)) for way in WAYS)


def _is_ours(file: Path) -> bool:
    return any(_is_inside(file, folder) for folder in OURS)

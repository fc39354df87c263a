"""Runs an old script with the names that JAX, optax and NumPy removed put back.

    python -m haiku_template.compat old_script.py ARGS

runs it as `python old_script.py ARGS` would, unedited. The names are there from the
script's first import of JAX on; processes that it spawns are without. Exit codes are
the script's; 64: there is no such file. In a program, for packages that nobody edits:

    from haiku_template import compat

    compat.install()  # Or config.compat = True; before importing the package.

A name that JAX has is never touched, but for functions that lost keywords, which take
these again; without `install` nothing is. Each name is logged once, with the place that
used it. Where the meaning has changed, and for what only words replace in
`jax_doctor.code.names`, the name stays gone. Imports no JAX. Why:
docs/decisions/doctor.md#compat
"""

import builtins
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from haiku_template.errors import chain

if TYPE_CHECKING:
    from jax_doctor.code.names import Removed


PATH = re.compile(r"(?:jax|haiku|haiku_template|optax|numpy|math|functools)(?:\.\w+)+")
# Removed names that this package itself has.
MOVED = {
    f"jax.{name}": f"haiku_template.devices.{name}"
    for name in ("device_put_replicated", "device_put_sharded")
}
# Modules that are gone, or have lost names, and those that still hold these names.
HOMES = {
    "jax.abstract_arrays": "jax.core",
    "jax.api": "jax",
    "jax.config": "jax.config",
    "jax.core": "jax._src.core",
    "jax.experimental.array_api": "jax.numpy",
    "jax.experimental.gda_serialization": "jax.experimental.array_serialization",
    "jax.experimental.maps": "jax.sharding",
    "jax.experimental.optix": "optax",
    "jax.experimental.optimizers": "jax.example_libraries.optimizers",
    "jax.experimental.shard": "jax.sharding",
    "jax.experimental.stax": "jax.example_libraries.stax",
    "jax.extend.ffi": "jax.ffi",
    "jax.lib.xla_bridge": "jax._src.xla_bridge",
    "jax.lib.xla_client": "jaxlib.xla_client",
    "jax.lib.xla_extension": "jaxlib._jax",
    "jax.linear_util": "jax.extend.linear_util",
    "jax.prng": "jax.extend.random",
    "jax.util": "jax._src.util",
    "jaxlib.xla_extension": "jaxlib._jax",
}


def _at(method: str) -> Callable[..., Any]:
    def update(x: Any, idx: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        # The flags of a scatter can be given by name alone today.
        kwargs |= zip(("indices_are_sorted", "unique_indices"), args, strict=False)
        return getattr(sys.modules["jax.numpy"].asarray(x).at[idx], method)(y, **kwargs)

    return update


# Makers of what has no path of the same meaning; each gets the module `jax`.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "jax.config.config": lambda jax: jax.config,
    "jax.core.get_aval": lambda jax: jax.typeof,
    "jax.experimental.disable_x64": lambda jax: lambda: jax.enable_x64(False),
    "jax.experimental.enable_x64": lambda jax: (
        lambda new_val=True: jax.enable_x64(new_val)
    ),
    "jax.interpreters.xla.pytype_aval_mappings": lambda jax: (
        jax._src.core.pytype_aval_mappings
    ),
    "jax.lax.tie_in": lambda jax: lambda x, y: y,
    "jax.numpy.NINF": lambda jax: -jax.numpy.inf,
    "jax.numpy.NZERO": lambda jax: -0.0,
    "jax.numpy.PZERO": lambda jax: 0.0,
    "jax.numpy.in1d": lambda jax: (
        lambda ar1, ar2, *a, **k: jax.numpy.isin(ar1, ar2, *a, **k).ravel()
    ),
    "jax.numpy.msort": lambda jax: lambda a: jax.numpy.sort(a, axis=0),
    "jax.ops.index_add": lambda jax: _at("add"),
    "jax.ops.index_max": lambda jax: _at("max"),
    "jax.ops.index_min": lambda jax: _at("min"),
    "jax.ops.index_mul": lambda jax: _at("multiply"),
    "jax.ops.index_update": lambda jax: _at("set"),
    "jax.random.shuffle": lambda jax: (
        lambda key, x, axis=0: jax.random.permutation(key, x, axis, independent=True)
    ),
    "numpy.NINF": lambda _: -math.inf,
    "numpy.NZERO": lambda _: -0.0,
    "numpy.PZERO": lambda _: 0.0,
    "numpy.alen": lambda _: len,
    "numpy.asfarray": lambda _: lambda a, dtype=float: np.asarray(a, dtype),
    "numpy.asscalar": lambda _: lambda a: a.item(),
    "numpy.in1d": lambda _: lambda a, b, *x, **k: np.isin(a, b, *x, **k).ravel(),
    "numpy.msort": lambda _: lambda a: np.sort(a, axis=0),
    "numpy.unicode": lambda _: str,
}
OF_PYTHON = ("int", "float", "complex", "object", "str")  # NumPy had its names, too.
MAKERS |= {f"numpy.{x}": lambda _, x=x: getattr(builtins, x) for x in OF_PYTHON}
# Removed keywords whose values change: each maps an old value to new keywords.
KEYWORDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "jax.nn.log_softmax(initial)": lambda value: {},
    "jax.nn.softmax(initial)": lambda value: {},
    "jax.pure_callback(vectorized)": lambda value: {
        "vmap_method": "legacy_vectorized" if value else "sequential"
    },
    "jax.scipy.linalg.solve(sym_pos)": lambda value: (
        {"assume_a": "pos"} if value else {}
    ),
}
PACKAGES = ("jax", "haiku", "optax", "numpy")
FIRST = "jax.numpy.clip(a)"  # Positional alone today.
# Rows that stay gone, and why.
NOT_SERVED = {  # Why: docs/decisions/doctor.md#removed-arguments
    "jax.ShapeDtypeStruct(named_shape)": "a class, which others compare with",
    "jax.experimental.pjit.pjit(in_axis_resources)": "None meant replicated",
    "jax.experimental.pjit.pjit(out_axis_resources)": "None meant replicated",
}
UNEXPECTED = re.compile(
    r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'"
)
# Words of NumPy's own errors, which have no name.
OF_NUMPY = re.compile(r"(?:module 'numpy' has no attribute '|`np\.)(\w+)")
BACK = (
    "; or config.compat = True puts it back, and in a config file that needs it "
    "itself, compat.install() (from haiku_template import compat)"
)
_used: set[str] = set()
_wrapped: set[str] = set()


class _Module(ModuleType):
    """Module whose missing names are looked up here, after its own `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = _value(self.__name__, name)
        except (AttributeError, ImportError):
            return super().__getattribute__(name)  # Raises the module's own error.
        _say(self.__name__, name)
        return value


@functools.cache
def removed() -> dict[str, "Removed"]:
    """The doctor's table of removed names, with what this package has of them."""
    from jax_doctor.code.names import REMOVED

    here = {name: REMOVED[name]._replace(instead=path) for name, path in MOVED.items()}
    return REMOVED | here


def install() -> None:
    """Puts the names back, for this process; doing so again changes nothing."""
    for package in PACKAGES:
        _install(package)


def _install(package: str) -> None:
    parents = {path.rpartition(".")[0] for path in removed() if "import " not in path}
    tops = (package, "jaxlib") if package == "jax" else (package,)
    names = {x for x in parents | HOMES.keys() if x.partition(".")[0] in tops}
    for path in {path.partition("(")[0] for path in removed() if "(" in path}:
        if path.startswith(f"{package}."):
            _take_keywords(path)
    for name in sorted(names):
        try:
            importlib.import_module(name).__class__ = _Module
        except ImportError:
            if name in HOMES:
                # Not as its parent's attribute: `jax.config` is another thing today.
                sys.modules[name] = _Module(name, "A module that is gone.")
                sys.modules[name].__spec__ = ModuleSpec(name, None)


def advice(error: BaseException) -> str:
    """Says what to do about a removed name that an error, or one behind it, met."""
    for each in chain(error):
        for path in _missed(each):
            if (row := removed().get(path)) is not None:
                # Of a keyword the error does not say whose function it was.
                unless = f"if it was {path.partition('(')[0]}: " * ("(" in path)
                back = BACK if row.instead else BACK.replace("or", "but", 1)
                return f"{unless}{row}{back * _is_served(path)}"
        if each.__suppress_context__ and each.__cause__ is None:
            break
    return ""


def _missed(error: BaseException) -> list[str]:
    """Paths of what an error did not find: a module, a name of one, or a keyword."""
    name = getattr(error, "name", None)
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return [f"{error.obj.__name__}.{name}"]
    if isinstance(error, ImportError):
        match = re.match(r"cannot import name '(\w+)'", str(error))
        return [f"{name}.{match[1]}"] if match else [str(name), f"import {name}"]
    if type(error) is TypeError and (match := UNEXPECTED.match(str(error))):
        return [x for x in removed() if x.endswith(f".{match[1]}({match[2]})")]
    if isinstance(error, AttributeError) and (match := OF_NUMPY.match(str(error))):
        return [f"numpy.{match[1]}"]
    return []


def _is_served(path: str) -> bool:
    if "(" in path or path.removeprefix("import ") in HOMES:
        return path not in NOT_SERVED
    with contextlib.suppress(AttributeError, ImportError):
        _value(*path.rpartition(".")[::2])
        return True
    return False


class _Finder:
    """Finder of the packages that lost names, which come back behind their import.

    One after another: none of them is imported while another is half imported.
    """

    def __init__(self) -> None:
        self.waiting = {*PACKAGES} - sys.modules.keys()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _install(name)

            spec.loader.exec_module = exec_module
        return spec


def run(script: str, arguments: list[str]) -> None:
    """Runs a script as Python does, as `__main__`, with the names put back."""
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(script)
    sys.modules["__main__"], sys.argv = main, [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    for package in sys.modules.keys() & {*PACKAGES}:
        _install(package)
    # Once one is imported, which may need variables set before.
    sys.meta_path.insert(0, _Finder())
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


def main() -> int:
    """Runs the script that the command line names; returns the exit code."""
    arguments = sys.argv[1:]
    usage = "python -m haiku_template.compat old_script.py ARGS"
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__ or usage)  # None by `python -OO`.
        return 0
    if not arguments or not os.path.isfile(arguments[0]):
        fault = f"{arguments[0]} cannot be read" if arguments else "a script is needed"
        print(f"error: {fault}; possible is {usage}", file=sys.stderr)
        return 64
    run(arguments[0], arguments[1:])
    return 0


def _take_keywords(path: str) -> None:
    """Makes a function take again what it no longer does."""
    lost = {row for row in removed().keys() - NOT_SERVED if row.startswith(f"{path}(")}
    if not lost or path in _wrapped:
        return
    _wrapped.add(path)
    (module, name), function = path.rpartition(".")[::2], _find(path)
    has = inspect.signature(function).parameters
    rows = {row[len(path) + 1 : -1]: row for row in lost}
    rows = {word: row for word, row in rows.items() if word not in has}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for word in [word for word in rows if word in kwargs]:
            _say(module, rows[word].removeprefix(f"{module}."))
            value, now = kwargs.pop(word), removed()[rows[word]].instead
            if rows[word] == FIRST:
                args = (value, *args)
            else:
                today = KEYWORDS.get(rows[word], lambda value, now=now: {now: value})
                kwargs |= today(value)
        return function(*args, **kwargs)

    setattr(_find(module), name, call)


def _value(module: str, name: str) -> Any:
    """Looks a removed name up: made here, where it moved to, or its module's home."""
    path = f"{module}.{name}"
    row = removed().get(path)
    if path in HOMES and path in sys.modules:
        return sys.modules[path]
    if path in MAKERS:
        return MAKERS[path](sys.modules.get("jax"))
    if row and PATH.fullmatch(row.instead):
        return _find(row.instead)
    # Of a module that is there, names in the table alone: others never were.
    still_there = not row.instead if row else module in removed()
    if still_there and module in HOMES and not name.startswith("_"):
        return getattr(_find(HOMES[module]), name)
    raise AttributeError(path)


def _find(path: str) -> Any:
    """Finds what a dotted path names, importing modules as needed."""
    module, *names = path.split(".")
    value = importlib.import_module(module)
    for name in names:
        module = f"{module}.{name}"
        if not hasattr(value, name):
            importlib.import_module(module)
        value = getattr(value, name)
    return value


def _say(module: str, name: str) -> None:
    """Logs a name once, with the file and line that used it."""
    if (path := f"{module}.{name}") in _used:
        return
    _used.add(path)
    row = removed().get(path) or removed()[module]._replace(name=path)
    frame = sys._getframe(2)
    while frame.f_back and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    logging.getLogger(__name__).warning("put back for %s: %s", where, row)


if __name__ == "__main__":
    # Another module than this one, whose place the script takes.
    sys.exit(importlib.import_module("haiku_template.compat").main())

"""Import of published code as it is, with stand-ins for what is not installed.

    from haiku_template import published

    with published.stand_ins("apache_beam", "tensorflow"):
        from searchless_chess.src import transformer

    modules = published.import_module("colabdesign.mpnn.modules", "build/published")

    with published.norms_over(axis_name):  # In a model's function.
        outputs = theirs.Net()(inputs, is_training)

    with published.collectives_over(axis_name, "i"):  # There, in a task or a step.
        loss = theirs.loss(outputs, batch)

Repositories import packages for data and plots next to their models. Imports no JAX.
Why: docs/decisions/models.md#stand-ins
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from haiku_template.bounded import is_dir, is_file
from haiku_template.errors import ConfigError

# Of `jax.lax`: reductions, what gathers, and an axis's own numbers.
COLLECTIVES = ("all_gather", "axis_index", "axis_size", "pmax", "pmean", "pmin", "psum")
logger = logging.getLogger(__name__)


class StandIn:
    """A stand-in for anything of a package that is not here: a name without a value.

    Its attributes, calls and subscripts are stand-ins; as a base class or a decorator
    it changes nothing. Where a value of it is asked for, Python raises a TypeError that
    names it; it equals itself, as `typing` asks, and nothing else. A call of it that
    is made once all is imported is said, as what it should have done is not.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "StandIn":
        # `copy` asks for them; NumPy before 2.4 for the dtype of a dtype, without end.
        is_dtype = name == "dtype" and self._name.endswith(".dtype")
        if name.startswith("__") or name == "_name" or is_dtype:
            whose = vars(self).get("_name", "a name")  # A copy has none at first.
            raise AttributeError(f"a stand-in for {whose} has no {name}")
        return vars(self).setdefault(name, StandIn(f"{self._name}.{name}"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for a result; leaves a function or class that it decorates."""
        decorates = len(args) == 1 and hasattr(args[0], "__qualname__")
        if not decorates and not any(isinstance(x, _Finder) for x in sys.meta_path):
            _say_called(self._name)
        return args[0] if decorates else StandIn(f"{self._name}()")

    def __getitem__(self, key: Any) -> "StandIn":
        return StandIn(f"{self._name}[]")

    def __or__(self, other: Any) -> "StandIn":  # In annotations.
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple) -> tuple:
        # A class of its own each time: of one for all, some orders have no MRO.
        return (type(self._name, (_Base,), {}),)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    __subclasscheck__ = __instancecheck__

    def __repr__(self) -> str:
        return f"<a stand-in for {self._name}, which is not installed>"

    def _refuse(self, *args: Any) -> Any:
        raise TypeError(f"a value is needed, and this is {self!r}")

    __bool__ = __iter__ = __len__ = __contains__ = _refuse
    __setitem__ = __delitem__ = __enter__ = __exit__ = _refuse
    __int__ = __float__ = __complex__ = __index__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __pos__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse


class _Base:
    """Base class in the place of one that is not here: it takes and has anything.

    What an object of it has of other bases, it has; the error for what it has not names
    the bases that are not here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _is_objects(type(self), "__init__"):
            return
        super().__init__(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        is_objects = _is_objects(cls, "__init_subclass__")
        super().__init_subclass__(**({} if is_objects else kwargs))

    def __getattr__(self, name: str) -> Any:
        if (look_up := getattr(super(), "__getattr__", None)) is not None:
            return look_up(name)
        bases = [x.__name__ for x in type(self).__mro__ if _Base in x.__bases__]
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}; of its bases "
            f"{', '.join(bases)} stands in for what is not installed"
        )


def _is_objects(cls: type, name: str) -> bool:
    """True if behind the stand-ins no base of a class has a method but `object`."""
    behind = cls.__mro__[cls.__mro__.index(_Base) + 1 :]
    return next(x for x in behind if name in vars(x)) is object


class _Module(ModuleType):
    """A module of stand-ins."""

    def __getattr__(self, name: str) -> StandIn:
        return vars(self).setdefault(name, getattr(StandIn(self.__name__), name))


class _Finder:
    """Finder and loader of the modules of packages that have stand-ins."""

    def __init__(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        self.attributes = attributes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(f"{name}.".startswith(f"{key}.") for key in self.attributes):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.attributes.get(module.__name__, {}))


@functools.cache
def _say_called(name: str) -> None:
    """Logs once that a stand-in is called, which has no effect."""
    logger.warning("%s() does nothing: %s is not installed", name, name.split(".")[0])


@contextlib.contextmanager
def norms_over(axis_name: str | None) -> Iterator[None]:
    """Makes `hk.BatchNorm` average over an axis, whatever code that stays says of it.

    Published models leave `cross_replica_axis` out, or name the axis of their own
    `jax.pmap`. For modules that are made in this context; None for one device.
    """
    import haiku as hk

    def named(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
        outputs, module = call(*args, **kwargs), context.module
        if context.method_name == "__init__" and isinstance(module, hk.BatchNorm):
            module.cross_replica_axis = axis_name
        return outputs

    with hk.intercept_methods(named):
        yield


@contextlib.contextmanager
def collectives_over(axis_name: str | None, theirs: str) -> Iterator[None]:
    """Makes collectives of `jax.lax` over an axis of published code be over another.

    Such code names that of its own `jax.pmap`. For what is traced in this context and
    calls them by `jax.lax`, or by a name that a module has of them (neither by one that
    is bound elsewhere, as in a `functools.partial`, nor in the backward function of a
    `jax.custom_vjp`, which is traced with the gradient: enter it around that); with
    None, for one device, the axis that it names has a size of one.
    """
    import jax

    def over(collective: Any) -> Any:
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if bound.arguments["axis_name"] != theirs:
                return collective(*args, **kwargs)
            if axis_name is None:
                return _alone(functools.partial(collective, *args, **kwargs), theirs)
            bound.arguments["axis_name"] = axis_name
            return collective(*bound.args, **bound.kwargs)

        return call

    before = {id(x): x for x in (getattr(jax.lax, name) for name in COLLECTIVES)}
    after = {key: over(collective) for key, collective in before.items()}
    places = _places(before)
    try:
        for names, name, key in places:
            names[name] = after[key]
        yield
    finally:
        for names, name, key in places:
            names[name] = before[key]


def _places(functions: Mapping[int, Any]) -> list[tuple[dict[str, Any], str, int]]:
    """Names of functions, by identity, in all modules but those that JAX is made of.

    One that was imported from `jax.lax` is a name of the module that did so.
    """
    modules = [
        vars(module)
        for name, module in [*sys.modules.items()]
        if inspect.ismodule(module) and (name == "jax.lax" or name[:4] != "jax.")
        if not functions.keys().isdisjoint(map(id, [*vars(module).values()]))
    ]
    return [
        (names, name, id(value))
        for names in modules
        for name, value in names.items()
        if id(value) in functions
    ]


def _alone(collective: Callable[[], Any], axis_name: str) -> Any:
    """Calls a collective over an axis of one; sizes of it stay Python's numbers."""
    import jax

    sizes = []

    def call() -> Any:
        value = collective()
        if isinstance(value, int | float):
            sizes.append(value)
        return value

    values = jax.vmap(call, axis_name=axis_name, axis_size=1)()
    return sizes[0] if sizes else jax.tree.map(lambda x: x[0], values)


@contextlib.contextmanager
def stand_ins(*packages: str, **attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which packages that are not installed can be imported.

    What is installed is imported as ever. Behind the context they are gone again, so
    that nobody else takes them for real; who has imported them keeps their names.

    Args:
      packages: names, such as `tensorflow`, or `alphafold.model.tf`; what is in them
        is there, too.
      attributes: of a package, what it must really have: `tree={"map_structure": f}`.
    """
    finder = _Finder(dict.fromkeys(packages, {}) | attributes)
    sys.meta_path.append(finder)  # The last to be asked.
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, x in sys.modules.items() if type(x) is _Module]:
            if finder.find_spec(name):
                parent, _, child = name.rpartition(".")
                vars(sys.modules.get(parent, finder)).pop(child, None)
                del sys.modules[name]


def import_module(name: str, folder: str | Path) -> ModuleType:
    """Imports a module of an unpacked wheel, or a clone, without its packages' init.

    These import other models, and what JAX removed: empty packages with the same path
    take their place, for what the module imports, too. Raises `ConfigError` if there is
    no such module, or another of its name, or of a package's, is imported already.
    """
    names = name.split(".")
    file = Path(folder, *names)
    if not is_file(file.with_suffix(".py")) and not is_dir(file):
        raise ConfigError(f"{folder} holds no {'/'.join(names)}.py to import {name} of")
    parent = None
    for n in range(1, len(names)):
        package, path = ".".join(names[:n]), Path(folder, *names[:n])
        module = sys.modules.setdefault(package, ModuleType(package))
        if not hasattr(module, "__file__") and not hasattr(module, "__path__"):
            module.__path__ = [str(path)]
        _check_place(module, path)
        if parent is not None:
            setattr(parent, names[n - 1], module)
        parent = module
    if parent is not None:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            _say_emptied(error)
            raise
    if name not in sys.modules:
        spec = PathFinder.find_spec(name, [str(folder)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    _check_place(sys.modules[name], file)
    return sys.modules[name]


def _say_emptied(error: ImportError) -> None:
    """Adds to an error of a missing name that its package's init was left out."""
    module = sys.modules.get(error.name or "")
    places = [] if hasattr(module, "__file__") else getattr(module, "__path__", ())
    if any(is_file(Path(place, "__init__.py")) for place in places):
        error.add_note(
            f"{error.name} was imported without its __init__, as import_module does; "
            "where code takes names of that, import it as ever, with its folder in "
            "sys.path, and stand_ins for what is not installed"
        )


def _check_place(module: ModuleType, path: Path) -> None:
    """Asserts that a module is a folder's package, or the file beside it."""
    file = Path(getattr(module, "__file__", None) or "Python")
    places = [*map(Path, getattr(module, "__path__", ()))] or [file.with_suffix("")]
    if path.resolve() not in [place.resolve() for place in places]:
        raise ConfigError(
            f"{module.__name__} of {path.parent} cannot be imported, since another is, "
            f"from {places[0]}; a process imports one module of a name"
        )

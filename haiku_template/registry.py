"""Names in a config: entries of a table, or a user's `module:function`."""

import importlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import PurePath
from types import ModuleType
from typing import Any

from haiku_template.errors import MEANT, PACKAGES, ConfigError, near

LISTS = ("writers", "hooks")  # Keys of several names.
IMPORTING: list[str] = []  # Modules of a user that are being imported.
# Why: docs/decisions/projects.md#ejected
ANOTHER_VERSION = (
    ", so it was written for another version of haiku_template: install that commit, "
    "or edit it (a loop or step of `make new EJECT=loop` is copied anew, and edited as "
    "the old copy was)"
)


def resolve(key: str, name: str, table: dict[str, Any]) -> Any:
    """Looks up a name in a table, or imports `module:function`, as an entry may be."""
    entry = table.get(name)
    if isinstance(entry, str):
        module, _, function = entry.partition(":")
        return getattr(importlib.import_module(module), function)
    return _users(key, name, table) if entry is None else entry


def _users(key: str, name: str, table: Iterable[str]) -> Callable:
    setting = check_name(key, name, table)
    module, _, function = str(name).partition(":")
    imported = _import(module, setting)
    if not hasattr(imported, function):
        file = getattr(imported, "__file__", module)
        raise ConfigError(
            f"{setting} cannot be imported from here: {file} has no {function}"
        )
    entry = getattr(imported, function)
    if not callable(entry):
        kind = type(entry).__name__
        raise ConfigError(f"{setting} is of type {kind}; it must be a function")
    return entry


def check_name(key: str, name: str, table: Iterable[str]) -> str:
    """Raises `ConfigError` for a name that is in no table and none of a user's.

    Imports nothing. Returns `config.KEY.name=NAME`, for other errors.
    """
    if not key.startswith("--"):  # A flag.
        key = f"config.{key}" + ".name" * ("." not in key and key not in LISTS)
    setting = f"{key}={name!r}"
    if name not in table and ":" not in str(name):
        guess = near(str(name), table, MEANT)
        possible = ", ".join([*table, "a function of yours as module:function"])
        raise ConfigError(f"{setting} is not known{guess}; possible are {possible}")
    return setting


# Why: docs/decisions/projects.md#ejected
def users_module(key: str, name: str, *functions: str) -> ModuleType:
    """Imports a user's module, which must have these functions."""
    setting = f"config.{key}={name!r}"
    imported = _import(name, setting)
    missing = [function for function in functions if not hasattr(imported, function)]
    if missing:
        raise ConfigError(f"{setting} has no {', no '.join(missing)}, as a {key} needs")
    return imported


def _import(module: str, setting: str) -> ModuleType:
    refusal = f"{setting} cannot be imported from here"
    if (file := PurePath(module)).suffix == ".py":
        parts = file.with_suffix("").parts
        name = f", {'.'.join(parts)!r}" if all(map(str.isidentifier, parts)) else ""
        raise ConfigError(
            f"{refusal}: {module!r} is a file; give its module's name{name}"
        )
    if not all(identifier.isidentifier() for identifier in module.split(".")):
        raise ConfigError(f"{refusal}: {module!r} is no name of a module")
    IMPORTING.append(module)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError)
        if is_absent and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{refusal}: {error}") from error
        if str(error.name).partition(".")[0] not in PACKAGES:
            raise  # The module exists, but not what it imports.
        raise ConfigError(f"{refusal}: {error}{ANOTHER_VERSION}") from error
    finally:
        IMPORTING.pop()


def make(
    key: str, values: Any, table: dict[str, Callable], *args: Any, **kwargs: Any
) -> Any:
    """Calls the function of `values.name` with the other values as keyword arguments.

    Of an unknown name or key, or a value that does not fit, `ConfigError` names `key`.
    """
    name = values.pop("name", None)
    function = resolve(key, name, table)
    check_keys(key, name, function, values, *args, **kwargs)
    try:
        return function(*args, **kwargs, **values)
    except ValueError as error:
        if name not in table or hasattr(error, "exit_code"):
            raise  # The errors of a user's function are its user's.
        raise ConfigError(f"config.{key}: {error}") from error


def check_keys(
    key: str, name: str, function: Callable, values: dict, *args: Any, **kwargs: Any
) -> None:
    """Raises `ConfigError` unless a function takes these keyword arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs, **values)
    except TypeError as error:
        free = [k for k in [*signature.parameters][len(args) :] if k not in kwargs]
        cause = str(error).removeprefix("inspect.Signature.bind() ")
        takes = f"it takes {', '.join(free) or 'no keys'}"
        raise ConfigError(f"config.{key}: {name} {cause}; {takes}") from error


def check_takes(what: str, function: Callable, *arguments: str) -> None:
    """Raises `ConfigError` unless a function takes as many arguments, by place."""
    if not callable(function):
        raise ConfigError(f"{what} is {function!r:.60}, and a function is needed")
    try:
        # Of a decorated function what is called, not what its decorator wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # Of a function in C.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{what} takes ({', '.join(signature.parameters)}), and it is called with "
            f"({', '.join(arguments)})"
        ) from error

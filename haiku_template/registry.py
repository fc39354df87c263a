"""Names in a config: entries of a table, or a user's `module:function`."""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from haiku_template.errors import MEANT, ConfigError, near

IMPORTING: list[str] = []  # Modules of a user that are being imported.


def resolve(key: str, name: str, table: dict[str, Any]) -> Any:
    """Looks up a name in a table, or imports `module:function`.

    An entry of the table may be `module:function` too, imported when it is asked for.
    If neither is there, `ConfigError` lists the table and the nearest name.
    """
    if isinstance(found := table.get(name), str):
        module, _, function = found.partition(":")
        return getattr(importlib.import_module(module), function)
    if found is not None:
        return found
    if not key.startswith("--"):  # A flag.
        key = f"config.{key}" + ".name" * ("." not in key and key != "writers")
    given = f"{key}={name!r}"
    module, colon, function = str(name).partition(":")
    if not colon:
        guess = near(str(name), table, MEANT)
        possible = ", ".join([*table, "a function of yours as module:function"])
        raise ConfigError(f"{given} is not known{guess}; possible are {possible}")
    imported = _import(module, given)
    if not hasattr(imported, function):
        where = getattr(imported, "__file__", module)
        raise ConfigError(
            f"{given} cannot be imported from here: {where} has no {function}"
        )
    found = getattr(imported, function)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{given} is of type {kind}; it must be a function")
    return found


def module(
    key: str, name: str | None, default: ModuleType, *functions: str
) -> ModuleType:
    """Imports a user's module, which must have these functions; or the default."""
    if name is None:
        return default
    found, given = _import(name, f"config.{key}={name!r}"), f"config.{key}={name!r}"
    missing = [function for function in functions if not hasattr(found, function)]
    if missing:
        raise ConfigError(f"{given} has no {', no '.join(missing)}, as a {key} needs")
    return found


def _import(module: str, given: str) -> ModuleType:
    refused = f"{given} cannot be imported from here"
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{refused}: {module!r} is no name of a module")
    IMPORTING.append(module)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # The module exists, but not one that it imports.
        raise ConfigError(f"{refused}: {error}") from error
    finally:
        IMPORTING.pop()


def make(
    key: str, values: Any, table: dict[str, Callable], *args: Any, **kwargs: Any
) -> Any:
    """Calls the function of `values.name` with the other values as keyword arguments.

    `*args` and `**kwargs` are further arguments. Of an unknown name or key, or a value
    that does not fit, `ConfigError` names `config.` and `key`.
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
        takes = ", ".join(free) or "no keys"
        words = str(error).removeprefix("inspect.Signature.bind() ")
        raise ConfigError(f"config.{key}: {name} {words}; it takes {takes}") from error

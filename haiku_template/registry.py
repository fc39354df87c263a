"""Names in a config: entries of a table, or a user's `module:function`."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from haiku_template.errors import ConfigError


def resolve(key: str, name: str, table: dict[str, Any]) -> Any:
    """Looks up a name in a table, or imports `module:function`.

    Raises:
      ConfigError: neither is there; the message lists the table and the nearest name.
    """
    if name in table:
        return table[name]
    key = key if "." in key or key == "writers" else f"{key}.name"
    module, colon, function = str(name).partition(":")
    if not colon:
        near = difflib.get_close_matches(str(name), table, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"config.{key}={name!r} is not known{guess}; possible are "
            f"{', '.join(table)}, or a function of yours as module:function"
        )
    refused = f"config.{key}={name!r} cannot be imported from here"
    imported = _import(module, refused)
    where = getattr(imported, "__file__", module)
    if not hasattr(imported, function):
        raise ConfigError(f"{refused}: {where} has no {function}")
    found = getattr(imported, function)
    if not callable(found):
        raise ConfigError(
            f"config.{key}={name!r} is a {type(found).__name__}, and no function"
        )
    return found


def module(key: str, name: str | None, default: ModuleType) -> ModuleType:
    """Imports a user's module, or raises `ConfigError`; without a name the default."""
    if name is None:
        return default
    return _import(name, f"config.{key}={name!r} cannot be imported from here")


def make(
    key: str, values: Any, table: dict[str, Callable], *args: Any, **kwargs: Any
) -> Any:
    """Calls the function of `values.name` with the other values as keyword arguments.

    `*args` and `**kwargs` are further arguments; `key` is named in messages.

    Raises:
      ConfigError: an unknown name or key, or a value that does not fit.
    """
    name = values.pop("name", None)
    function = resolve(key, name, table)
    check_keys(key, name, function, values, *args, **kwargs)
    if name not in table:
        return function(*args, **kwargs, **values)  # Its errors are its user's.
    try:
        return function(*args, **kwargs, **values)
    except ValueError as error:
        if hasattr(error, "exit_code"):
            raise
        raise ConfigError(f"config.{key}: {error}") from error


def _import(module: str, refused: str) -> ModuleType:
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{refused}: {module!r} is no name of a module")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # The module exists, but not one that it imports.
        raise ConfigError(f"{refused}: {error}") from error


def check_keys(
    key: str, name: str, function: Callable, values: dict, *args: Any, **kwargs: Any
) -> None:
    """Raises `ConfigError` unless a function takes these keyword arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs, **values)
    except TypeError as error:
        given = list(signature.parameters)[len(args) :]
        takes = [parameter for parameter in given if parameter not in kwargs]
        raise ConfigError(
            f"config.{key}: {name} {error}; it takes {', '.join(takes) or 'no keys'}"
        ) from error

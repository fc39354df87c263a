"""Parameters inside a tree: {module: {name: array}}, or a pair of them and state."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from haiku_template.conversion.pickles import Array, Object
from haiku_template.errors import ConfigError, near, some

PARAMS, STATE = "params", ("state", "net_state", "hk_state", "haiku_state")
DEEPEST, SHOWN = 8, 12  # Levels that are searched, and keys in a message.
MOST = 10**5  # Leaves and containers.
Path = tuple[str, ...]


def choose(
    tree: Any, key: str | None = None
) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """Chooses the parameters, and network state, of a tree.

    Args:
      key: of the subtree, `a/b` for one inside another; None for the only one.

    Returns:
      Arrays by name, `params/` or `state/` before the names of a pair; the subtree's
      key, "" for the whole tree; and the keys of what is not in it.

    Raises `ConfigError` if there is no such subtree, or no only one.
    """
    path = _only(tree) if key is None else _resolve(tree, key)
    title = "/".join(path)
    subtree, other_keys = _parameters(_at(tree, path))
    arrays: dict[str, np.ndarray] = {}
    for name, leaf in _leaves(subtree):
        if name in arrays:
            raise ConfigError(f"it holds two arrays whose name would be {name}")
        if not isinstance(leaf, Array) or leaf.values is None:
            subject = f"{title or 'it'} holds {name}, " if name else f"{key} is "
            raise ConfigError(
                f"{subject}a {type(leaf).__name__}; parameters must be arrays"
            )
        arrays[name] = leaf.values
    if not arrays:
        raise ConfigError(f"{title or 'it'} holds no arrays")
    above = [
        "/".join((*path[:i], name))
        for i, child in enumerate(path)
        for name in _items(_at(tree, path[:i]))
        if name != child
    ]
    return arrays, title, above + other_keys


def is_params(node: Any) -> bool:
    """Tests for {module: {name: array}}, of which none is an object."""
    if not _is_dict(node) or not any(node.values()):
        return False
    # A module that is named many times is looked at once.
    modules = {id(module): module for module in node.values()}.values()
    return all(
        _is_dict(module) and all(map(_is_number, module.values())) for module in modules
    )


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict) and not isinstance(node, Object)


def _is_number(x: Any) -> bool:
    values = x.values if isinstance(x, Array) else None
    return values is not None and values.dtype.kind not in "SU"


def _items(node: Any) -> dict[str, Any]:
    """Children of a container by key, and none of a leaf."""
    if isinstance(node, list | tuple):
        return {str(i): x for i, x in enumerate(node)}
    # Moments of Optax, whose states are objects, have the form of parameters.
    is_state = isinstance(node, Object) and node.of.startswith("optax.")
    if not isinstance(node, dict) or is_state:
        return {}
    items = {str(k): x for k, x in node.items()}
    if len(items) < len(node):
        raise ConfigError(f"two of its keys have one name, among {some(items)}")
    return items


def _at(node: Any, path: Path) -> Any:
    for key in path:
        node = _items(node)[key]
    return node


def _pair(node: Any) -> tuple[dict, dict, list[str]] | None:
    """Parameters, state, and the keys of all else in a node; None if it is no pair."""
    items = _items(node)
    by_place = "1" in items and isinstance(node, list | tuple | Object)
    params_key, state_keys = ("0", ("1",)) if by_place else (PARAMS, STATE)
    params = items.pop(params_key, None)
    state = next((items.pop(key) for key in state_keys if key in items), {})
    # Haiku's state may be trees inside of its modules.
    if not is_params(params) or not _is_dict(state):
        return None
    if not all(_is_number(x) for _, x in _leaves(state)):
        return None
    if by_place and not _is_state(params, state, [*items.values()]):
        return None
    return params, state, [*items]


def _is_state(params: dict, state: dict, others: list[Any]) -> bool:
    """Tests what follows parameters in a tuple: averages or moments are no state."""
    forms = _forms(params)
    same = [*map(_forms, (state, *state.values()))]  # Such as moments, m and v.
    if any(x and x <= forms for x in same) or any(map(is_params, others)):
        return False
    # Before other things, a state of trees may be an optimizer's.
    return not others or not any(state.values()) or is_params(state)


def _forms(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, x.values.shape) for name, x in _leaves(tree)}


def _parameters(node: Any) -> tuple[Any, list[str]]:
    """The parameters of a subtree, and the keys of all else in it."""
    if not is_params(node) and (pair := _pair(node)):
        params, state, other_keys = pair
        return ({PARAMS: params, STATE[0]: state} if state else params), other_keys
    if not isinstance(node, dict) or not any(map(_is_number, node.values())):
        return node, []
    numbers = {key: x for key, x in node.items() if _is_number(x)}
    modules = {key: x for key, x in node.items() if is_params({key: x})}
    # Numbers beside modules are a counter's, such as `step`.
    is_beside = modules and not any(x.values.ndim for x in numbers.values())
    subtree = modules if is_beside else numbers
    return subtree, [str(key) for key in node if key not in subtree]


def _only(tree: Any) -> Path:
    """Path of the only outermost subtree that is parameters, or a pair with state.

    A tree of arrays by joined names is one as it is.
    """
    paths, visited, level = [], set(), [((), tree)]
    for _ in range(DEEPEST):
        below = []
        for path, node in level:
            if id(node) in visited:
                continue
            visited.add(id(node))
            if is_params(node) or _pair(node):
                paths.append(path)
            else:
                below += [((*path, key), x) for key, x in _items(node).items()]
        level = below
    if len(paths) > 1:
        raise ConfigError(
            f"it holds {len(paths)} sets of parameters; choose one: "
            + " or ".join(f"--key={'/'.join(path)}" for path in paths)
        )
    is_flat = isinstance(tree, dict) and any(map(_is_number, tree.values()))
    if not paths and not is_flat:
        names = ", ".join([*_items(tree)][:SHOWN])
        kind = "dict" if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(
            "it holds no parameters, which are arrays by module and name, but "
            + (f"a {kind} of {names}" if names else kind)
        )
    return paths[0] if paths else ()


def _resolve(tree: Any, key: str) -> Path:
    path: Path = ()
    remainder = key
    while remainder:
        names = [*_items(_at(tree, path))]
        fits = [n for n in names if remainder == n or remainder.startswith(f"{n}/")]
        if not fits:
            where = f"inside {'/'.join(path)}" if path else "in it"
            raise ConfigError(
                f"--key={key} is not there{near(remainder, names)}; {where} are "
                f"{', '.join(names[:SHOWN]) or 'no keys'}"
            )
        name = max(fits, key=len)
        path, remainder = (*path, name), remainder[len(name) + 1 :]
    return path


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    """Leaves by name: keys joined by `/`, which also replaces `//` and `:` in them."""
    queue = [((), node)]
    for _ in range(MOST):
        if not queue:
            return
        path, item = queue.pop()
        if not isinstance(item, dict | list | tuple):
            yield "/".join(path).replace("//", "/").replace(":", "/"), item
        elif len(path) > DEEPEST:
            raise ConfigError(f"its dictionaries are more than {DEEPEST} deep")
        else:
            queue += [((*path, key), x) for key, x in _items(item).items()][::-1]
    raise ConfigError(f"it names more than {MOST:,} arrays and dictionaries")

"""Parameters inside a tree: {module: {name: array}}, or a pair of them and state."""

from collections.abc import Iterable, Iterator
from typing import Any

from haiku_template.conversion.pickles import Array
from haiku_template.errors import ConfigError, near

PARAMS, STATE = "params", ("state", "net_state", "hk_state", "haiku_state")
DEEPEST, SHOWN = 8, 12  # Levels that are searched, and keys in a message.
MOST = 10**5  # Leaves and containers.
Path = tuple[str, ...]


def choose(
    tree: Any, key: str | None = None
) -> tuple[dict[str, Array], str, list[str]]:
    """Chooses the parameters, and network state, of a tree.

    Args:
      key: of the subtree, `a/b` for one inside another; None for the only one.

    Returns:
      Arrays by name, `params/` or `state/` before the names of a pair; the subtree's
      key, "" for the whole; and the keys of what was left out.

    Raises:
      ConfigError: there is no such subtree, or no only one.
    """
    if key is None:
        path, *others = _find(tree) or _flat(tree)
        if others:
            raise ConfigError(
                f"it holds {len(others) + 1} sets of parameters; choose one: "
                + " or ".join(f"--key={'/'.join(found)}" for found in (path, *others))
            )
    else:
        path = _resolve(tree, key)
    taken, left = _take(_at(tree, path))
    arrays, path_words = {}, "/".join(path)
    for name, array in taken:
        if name in arrays:
            raise ConfigError(f"it holds two arrays whose name would be {name}")
        if not isinstance(array, Array) or array.dtype is None:
            what = f"{path_words or 'it'} holds {name}, " if name else f"{key} is "
            raise ConfigError(
                f"{what}a {type(array).__name__}; parameters must be arrays"
            )
        arrays[name] = array
    if not arrays:
        raise ConfigError(f"{path_words or 'it'} holds no arrays")
    above = [
        "/".join((*path[:i], name))
        for i, part in enumerate(path)
        for name, _ in _items(_at(tree, path[:i]))
        if name != part
    ]
    return arrays, path_words, above + left


def is_params(node: Any) -> bool:
    """Tests for {module: {name: array}}."""
    return (
        isinstance(node, dict)
        and any(node.values())
        and all(isinstance(module, dict) for module in node.values())
        and all(_is_number(x) for m in _distinct(node) for x in m.values())
    )


def _distinct(node: dict[Any, Any]) -> Iterable[Any]:
    """Values, one that is named many times but once."""
    return {id(value): value for value in node.values()}.values()


def _is_number(x: Any) -> bool:
    return isinstance(x, Array) and x.dtype is not None and x.dtype.kind not in "SU"


def _items(node: Any) -> list[tuple[str, Any]]:
    pairs = node.items() if isinstance(node, dict) else ()
    pairs = enumerate(node) if isinstance(node, list | tuple) else pairs
    return [(str(name), item) for name, item in pairs]


def _at(node: Any, path: Path) -> Any:
    for part in path:
        node = dict(_items(node))[part]
    return node


def _pair(node: Any) -> tuple[dict, dict, list[str]] | None:
    """Parameters, state, and the keys of what else lies beside them."""
    found = dict(_items(node))
    is_tuple = isinstance(node, list | tuple) and len(node) == 2
    first, others = ("0", ("1",)) if is_tuple else (PARAMS, STATE)
    params = found.pop(first, None)
    if not is_params(params):
        return None
    state = next((found.pop(name) for name in others if name in found), {})
    # Haiku's state may be trees inside of its modules.
    is_dict = isinstance(state, dict)
    if not is_dict or not all(_is_number(x) for _, x in _names(state)):
        return None
    return params, state, [*found]


def _find(tree: Any) -> list[Path]:
    """Paths of the outermost subtrees that are parameters, or a pair with state."""
    found, seen, level = [], set(), [((), tree)]
    for _ in range(DEEPEST):
        below = []
        for path, node in level:
            if id(node) in seen:
                continue
            seen.add(id(node))
            if is_params(node) or _pair(node):
                found.append(path)
            else:
                below += [((*path, name), item) for name, item in _items(node)]
        level = below
    return found


def _flat(tree: Any) -> list[Path]:
    """The whole tree, if it is arrays by joined names; raises `ConfigError`."""
    if isinstance(tree, dict) and any(_is_number(x) for x in tree.values()):
        return [()]
    names = ", ".join(name for name, _ in _items(tree)[:SHOWN])
    raise ConfigError(
        "it holds no parameters, which are arrays by module and name, but "
        + (f"a {type(tree).__name__} of {names}" if names else type(tree).__name__)
    )


def _resolve(tree: Any, key: str) -> Path:
    path, rest = (), key
    while rest:
        names = [name for name, _ in _items(_at(tree, path))]
        fits = [n for n in names if rest == n or rest.startswith(f"{n}/")]
        if not fits:
            where = f"inside {'/'.join(path)}" if path else "in it"
            raise ConfigError(
                f"--key={key} is not there{near(rest, names)}; {where} are "
                f"{', '.join(names[:SHOWN]) or 'no keys'}"
            )
        name = max(fits, key=len)
        path, rest = (*path, name), rest[len(name) + 1 :]
    return path


def _take(node: Any) -> tuple[list[tuple[str, Any]], list[str]]:
    """Names and arrays of a subtree, and the keys that are left out."""
    pair = None if is_params(node) else _pair(node)
    if pair:
        params, state, left = pair
        return [*_names({PARAMS: params, STATE[0]: state} if state else params)], left
    left = []
    if isinstance(node, dict) and any(_is_number(x) for x in node.values()):
        left = [str(name) for name, x in node.items() if not _is_number(x)]
        node = {name: x for name, x in node.items() if _is_number(x)}
    return [*_names(node)], left


def _names(node: Any) -> Iterator[tuple[str, Any]]:
    """Leaves by name: keys joined by `/`, and `//` or `:` inside of them made so."""
    left = [((), node)]
    for _ in range(MOST):
        if not left:
            return
        path, item = left.pop()
        if not isinstance(item, dict | list | tuple):
            yield "/".join(path).replace("//", "/").replace(":", "/"), item
        elif len(path) > DEEPEST:
            raise ConfigError(f"its dictionaries are more than {DEEPEST} deep")
        else:
            left += [((*path, key), x) for key, x in _items(item)][::-1]
    raise ConfigError(f"it names more than {MOST:,} arrays and dictionaries")

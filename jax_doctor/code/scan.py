"""Removed names in a syntax tree, by what its imports bind; nothing is run."""

import ast
import re
from collections.abc import Iterable, Iterator

from jax_doctor.code.names import REMOVED, Removed

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, ast.ClassDef, *COMPREHENSIONS)
MISSING = {"ImportError", "ModuleNotFoundError", "AttributeError"}
VERSION = re.compile(r"(?i)jax.*version|__version(_info)?__")
PACKAGES = ("jax", "haiku", "optax")  # And jaxlib.
NAMED = (*FUNCTIONS[:2], ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
Paths = dict[str, str]  # Of modules and what they hold, by the variable bound to them.


def removed_names(tree: ast.Module) -> set[tuple[int, Removed]]:
    """Finds the removed names that a module uses, with their lines.

    A use that the code makes conditional, by `try` and `except ImportError` or by a
    version, is no finding, nor is a name that the module itself puts back.
    """
    guarded = _guarded(tree)
    found, put_back = set(), set()
    paths = _bound(tree.body, {}, guarded)
    waiting: list[tuple[ast.AST, Paths]] = [(node, paths) for node in tree.body]
    while waiting:
        node, paths = waiting.pop()
        waiting += _inside(node, paths, guarded)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            put_back.add(_path(node, paths))
        elif id(node) not in guarded:
            found.update(_uses(node, paths))
    return {(line, row) for line, row in found if row.name not in put_back}


def _uses(node: ast.AST, paths: Paths) -> Iterator[tuple[int, Removed]]:
    """Yields the removed names in one node, without those inside it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        for name, path in _imported(node):
            module = path if isinstance(node, ast.Import) else node.module
            if row := _row(path) or REMOVED.get(f"import {module}"):
                yield name.lineno, row
    elif isinstance(node, ast.Attribute):
        row = _row(_path(node, paths))
        # Once is enough for a name whose import was found already.
        while isinstance(node, ast.Attribute):
            line, node = node.end_lineno, node.value
        if row and row != _row(_path(node, paths)):
            yield line, row
    elif isinstance(node, ast.Call):
        path = _path(node.func, paths)
        for keyword in node.keywords:
            if row := REMOVED.get(f"{path}({keyword.arg})"):
                yield keyword.lineno, row


def _row(path: str) -> Removed | None:
    """Looks up a path, or the longest part of it from its beginning."""
    while path and path not in REMOVED:
        path = path.rpartition(".")[0]
    return REMOVED.get(path)


def _path(node: ast.AST, paths: Paths) -> str:
    """Path that a chain of attributes stands for; empty if it is not of an import."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in paths:
        return ""
    return ".".join([paths[node.id], *reversed(names)])


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[ast.alias, str]]:
    """Yields the names of an import with their whole paths; none of a relative one."""
    for name in node.names:
        if isinstance(node, ast.Import):
            yield name, name.name
        elif node.level == 0:
            yield name, f"{node.module}.{name.name}"


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields the variables that an import binds, and the path of each."""
    for name, path in _imported(node):
        if isinstance(node, ast.Import) and not name.asname:
            path = path.partition(".")[0]
        yield name.asname or path.rpartition(".")[2], path


def _inside(
    node: ast.AST, paths: Paths, guarded: set[int]
) -> Iterator[tuple[ast.AST, Paths]]:
    """Yields the nodes inside of one, each with the variables that it sees."""
    if isinstance(node, ast.Attribute) and _path(node, paths):
        return  # A chain counts once, from its end.
    inner = paths
    if isinstance(node, SCOPES):
        inner = _bound(ast.iter_child_nodes(node), paths, guarded)
    for child in ast.iter_child_nodes(node):
        # Methods do not see the variables of their class.
        outer = isinstance(node, ast.ClassDef) and isinstance(child, FUNCTIONS)
        yield child, paths if outer else inner


def _bound(nodes: Iterable[ast.AST], outer: Paths, guarded: set[int]) -> Paths:
    """Variables that a scope sees, without those that it binds to something else."""
    imports, others, aliases = {}, set(), []
    waiting = list(nodes)[::-1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            others.update(name.asname or name.name for name in node.names)
            bound = dict(_bindings(node))
            old = {name for name, path in bound.items() if _row(path)}
            for name in bound.keys() - (old if id(node) in guarded else set()):
                imports[name] = bound[name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            named = [target.id for target in targets if isinstance(target, ast.Name)]
            aliases += [(name, node.value) for name in named]
        elif isinstance(node, ast.Global | ast.Nonlocal):
            others.difference_update(node.names)
        elif isinstance(node, NAMED):
            others.add(node.name)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            others.add(node.id)
        if not isinstance(node, SCOPES):
            waiting += list(ast.iter_child_nodes(node))[::-1]
    paths = {name: path for name, path in outer.items() if name not in others} | imports
    for name, value in aliases:
        if name not in imports and (path := _path(value, outer | imports)):
            paths[name] = path
    return paths


def _guarded(tree: ast.Module) -> set[int]:
    """Identities of the nodes that run under a condition on what JAX has."""
    guarded, nodes = set(), list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = [binding for node in imports for binding in _bindings(node)]
    known = {variable for variable, path in bound if path.startswith(PACKAGES)}
    for node in nodes:
        held = []
        if isinstance(node, ast.Try) and any(_catches(h.type) for h in node.handlers):
            held = [*node.body, *node.handlers]
        elif isinstance(node, ast.With):  # Such as contextlib.suppress(ImportError).
            held = (
                node.body if any(_catches(i.context_expr) for i in node.items) else []
            )
        elif isinstance(node, FUNCTIONS[:2]):
            held = _after_return(node.body, known)
        elif isinstance(node, ast.If | ast.IfExp | ast.BoolOp):
            held = [node] if _asks(getattr(node, "test", node), known) else []
        guarded.update(id(inner) for part in held for inner in ast.walk(part))
    return guarded


def _after_return(body: list[ast.stmt], known: set[str]) -> list[ast.stmt]:
    """Statements behind a condition that returns where JAX has what it asks for."""
    for i, node in enumerate(body):
        returns = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)
        if returns and _asks(node.test, known):
            return body[i:]
    return []


def _catches(what: ast.expr | None) -> bool:
    names = ast.walk(what) if what else ()
    return any(isinstance(name, ast.Name) and name.id in MISSING for name in names)


def _asks(test: ast.expr, known: set[str]) -> bool:
    """True if a condition asks for a version, or for a name of a known module."""
    for node in ast.walk(test):
        if VERSION.search(getattr(node, "id", "") or getattr(node, "attr", "")):
            return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            owner = {getattr(n, "id", "") for arg in node.args for n in ast.walk(arg)}
            return bool(owner & known)
    return False

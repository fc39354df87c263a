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
PACKAGES = ("jax", "haiku", "optax", "numpy")  # And jaxlib.
BINDERS = (*FUNCTIONS[:2], ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
Paths = dict[str, str]  # Of modules and what they hold, by the variable bound to them.


def removed_names(tree: ast.Module) -> set[tuple[int, Removed]]:
    """Finds the removed names that a module uses, with their lines.

    A use that the code makes conditional, by `try` and `except ImportError` or by a
    version, is no finding, nor is a name that the module itself puts back.
    """
    guarded = _guarded(tree)
    uses, restored = set(), set()
    paths = _bound(tree.body, {}, guarded)
    stack: list[tuple[ast.AST, Paths]] = [(node, paths) for node in tree.body]
    while stack:
        node, paths = stack.pop()
        stack += _inside(node, paths, guarded)
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            restored.add(_path(node, paths))
        elif id(node) not in guarded:
            uses.update(_uses(node, paths))
    return {(line, row) for line, row in uses if row.name not in restored}


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
    imports, variables, aliases = {}, set(), []
    stack = list(nodes)[::-1]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            variables.update(name.asname or name.name for name in node.names)
            for name, path in _bindings(node):
                if id(node) not in guarded or not _row(path):
                    imports[name] = path
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            aliases += [(name, node.value) for name in names]
        elif isinstance(node, ast.Global | ast.Nonlocal):
            variables.difference_update(node.names)
        elif isinstance(node, BINDERS):
            variables.add(node.name)
        elif isinstance(node, ast.arg):
            variables.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            variables.add(node.id)
        if not isinstance(node, SCOPES):
            stack += list(ast.iter_child_nodes(node))[::-1]
    paths = {name: outer[name] for name in outer.keys() - variables} | imports
    for name, value in aliases:
        if name not in imports and (path := _path(value, outer | imports)):
            paths[name] = path
    return paths


def _guarded(tree: ast.Module) -> set[int]:
    """Identities of the nodes that run under a condition on what JAX has."""
    guarded, nodes = set(), list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bindings = [binding for node in imports for binding in _bindings(node)]
    modules = {variable for variable, path in bindings if path.startswith(PACKAGES)}
    for node in nodes:
        block = []
        if isinstance(node, ast.Try) and any(_catches(h.type) for h in node.handlers):
            block = [*node.body, *node.handlers]
        elif isinstance(node, ast.With):  # Such as contextlib.suppress(ImportError).
            catches = any(_catches(item.context_expr) for item in node.items)
            block = node.body if catches else []
        elif isinstance(node, FUNCTIONS[:2]):
            block = _after_return(node.body, modules)
        elif isinstance(node, ast.If | ast.IfExp | ast.BoolOp):
            block = [node] if _asks(getattr(node, "test", node), modules) else []
        guarded.update(id(inner) for outer in block for inner in ast.walk(outer))
    return guarded


def _after_return(body: list[ast.stmt], modules: set[str]) -> list[ast.stmt]:
    """Statements behind a condition that returns where JAX has what it asks for."""
    for i, node in enumerate(body):
        returns = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)
        if returns and _asks(node.test, modules):
            return body[i:]
    return []


def _catches(exceptions: ast.expr | None) -> bool:
    names = ast.walk(exceptions) if exceptions else ()
    return any(isinstance(name, ast.Name) and name.id in MISSING for name in names)


def _asks(test: ast.expr, modules: set[str]) -> bool:
    """True if a condition asks for a version, or for a name of one of these modules."""
    for node in ast.walk(test):
        if VERSION.search(getattr(node, "id", "") or getattr(node, "attr", "")):
            return True
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr":
            owner = {getattr(n, "id", "") for arg in node.args for n in ast.walk(arg)}
            return bool(owner & modules)
    return False

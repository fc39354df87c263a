"""Each limit of time, size or tries is on a page that says why it holds for large work.

A constant of a module is one if its name says so. A time limit that is written where it
is used has no name, and no reason: those are refused.
"""

import ast
import re

import pytest

from tests.runs import ROOT

PACKAGES = ("haiku_template", "haiku_text", "jax_doctor", "launch")
FILES = [file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))]
NAME = re.compile(
    "SECONDS|MINUTES|HOUR|CENTURY|BYTES|LIMIT|M[AO][XS]T?_|(MOST|MAX)$|LARGEST|LONGEST|"
    "DEEPEST|PATIENCE|TRIES|TIMES$|READS|REPEATS|DEPTH|AHEAD|BACKLOG|LINKS|ENDLESS|"
    "FRUITLESS|REMEMBERED|PENDING|SUSPECTS|GUESSES|ROOM|ALWAYS|CHAIN|PADDED|TESTED|"
    "AGREED|CALLS|SLOW|LOOKED_AT"
)
PAGE = (ROOT / "docs/limits.md").read_text()
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (`[^|]*`) \| ([^|]+) \|$", re.M)
WAITS = {"wait", "join", "acquire", "settimeout", "poll", "communicate", "result"}


def is_number(node):
    """True for a number, an expression of numbers, or a tuple of them."""
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(is_number, node.elts))
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    is_constant = isinstance(node, ast.Constant)
    return is_constant and type(node.value) in (int, float)


def numbers(tree):
    """Names of a module's numbers."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if isinstance(node, ast.AnnAssign) and node.value:
            targets = [node.target]
        for target in targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            yield from (name.id for name, value in pairs if is_number(value))


def limits():
    """File and name of each limit."""
    for file in FILES:
        names = filter(NAME.search, numbers(ast.parse(file.read_text())))
        yield from ((str(file.relative_to(ROOT)), name) for name in names)


def listed():
    """File and name of each limit on the page."""
    for file, names, _ in ROW.findall(PAGE):
        yield from ((file, name) for name in re.findall(r"`(\w+)`", names))


def unnamed(tree):
    """Lines of waits whose seconds are a number that is written there."""
    for node in (x for x in ast.walk(tree) if isinstance(x, ast.Call)):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        values = [x.value for x in node.keywords if "timeout" in (x.arg or "")]
        values += node.args if name in WAITS else []
        if any(is_number(x) and getattr(x, "value", 1) != 0 for x in values):
            yield node.lineno


def test_each_limit_has_its_reason_and_each_reason_its_limit():
    there, reasons = sorted(limits()), sorted(listed())
    assert [x for x in there if x not in reasons] == [], "docs/limits.md lacks them"
    assert [x for x in reasons if x not in there] == [], "docs/limits.md is too long"
    assert len(reasons) == len({*reasons})


def test_a_reason_is_more_than_a_name():
    rows = ROW.findall(PAGE)
    assert len(rows) == len(re.findall(r"^\| `", PAGE, re.M))
    assert [x for x in rows if len(x[2].split()) < 5] == []


def test_a_time_limit_has_a_name():
    """With its reason in docs/limits.md."""
    places = {file: [*unnamed(ast.parse(file.read_text()))] for file in FILES}
    assert [f"{file}: {lines}" for file, lines in places.items() if lines] == []


@pytest.mark.parametrize(
    ("code", "names", "lines"),
    [
        ("LEAVE_SECONDS, CODE = 2.0, 69", ["LEAVE_SECONDS"], []),
        (
            "RETRY_SECONDS = (1.0, 2.0)\nMOST: int = 2**20",
            ["RETRY_SECONDS", "MOST"],
            [],
        ),
        ("SECONDS = 'seconds'\nNAMES = 3", [], []),
        ("link.settimeout(3)\nf(timeout=2 * 5)\nlock.acquire(timeout=X)", [], [1, 2]),
        ("poll.poll(0)\n', '.join(x)\nchild.wait()", [], []),
    ],
)
def test_what_the_walk_sees(code, names, lines):
    tree = ast.parse(code)
    assert [*filter(NAME.search, numbers(tree))] == names and [*unnamed(tree)] == lines

"""Files of a workdir that others made: nothing hangs, recurses or fills memory."""

import ast
import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from haiku_template import bounded
from haiku_template.config import of_run
from haiku_template.errors import ConfigError
from tests.runs import ROOT
from tests.storage.test_workdir import run

DEEP = "[" * 200_000
DAMAGE = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "deep": lambda path: path.write_text(DEEP),
    "deep keys": lambda path: path.write_text('{"a":' * 900 + "1" + "}" * 900),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "empty": Path.touch,
    "another type": lambda path: path.write_text("[1, 2]"),
    "large": lambda path: (path.touch(), os.truncate(path, 2**30)),
    "folder": Path.mkdir,
}
# In a process of its own JSON is what it wrote itself, or a peer of the same run did.
ALONE = {"bounded.py", "children.py", "code/files.py"}
ALONE |= {f"cluster/{name}.py" for name in ("heartbeat", "identity", "relay")}


@contextlib.contextmanager
def within(seconds, mebibytes):
    """Fails a test that takes longer, or more memory."""

    def late(*_):
        raise AssertionError("it hangs")

    before, most = signal.signal(signal.SIGALRM, late), _peak() + mebibytes
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert _peak() < most


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


SLOW = ("fifo", "large", "deep keys")  # Half a minute each; the others beside them.


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=getattr(pytest.mark, "slow" if k in SLOW else "long"))
        for k in DAMAGE
    ],
)
def test_each_file_of_a_workdir_may_be_anything(tmp_path, kind, capfd):
    whole = tmp_path / "whole"
    run(whole)
    names = [p.relative_to(whole) for p in sorted(whole.rglob("*")) if p.is_file()]
    assert len(names) > 20
    for number, name in enumerate(names):
        workdir = tmp_path / str(number)
        shutil.copytree(whole, workdir)
        (workdir / name).unlink()
        DAMAGE[kind](workdir / name)
        with within(20, mebibytes=1500):
            try:
                run(workdir, 5)
            except Exception as error:
                assert hasattr(error, "exit_code"), (name, error)
                assert str(error).count("\n") == 0, (name, error)
        shutil.rmtree(workdir)
    capfd.readouterr()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_config_may_be_anything(tmp_path, kind):
    DAMAGE[kind](tmp_path / "config.json")
    with within(10, 300), pytest.raises(ConfigError, match=r"config\.json cannot be"):
        of_run(tmp_path)


@pytest.mark.parametrize("kind", [k for k in DAMAGE if k not in ("binary", "empty")])
def test_a_regular_file_is_read_up_to_a_size(tmp_path, kind):
    DAMAGE[kind](tmp_path / "a")
    with within(10, 300), pytest.raises((OSError, ValueError)):
        bounded.read_json(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"x" * 9)
    assert bounded.contents(tmp_path / "b", 9) == b"x" * 9
    with pytest.raises(ValueError, match="more than 8 bytes"):
        bounded.contents(tmp_path / "b", 8)


def test_json_is_parsed_to_a_depth():
    def nested(depth):
        return '{"a":[' * (depth // 2) + "]}" * (depth // 2)

    assert bounded.parse(nested(bounded.DEPTH))
    for depth in (bounded.DEPTH + 2, 900, 5000, 200_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            bounded.parse(nested(depth))
    wide = "[" + ",".join(["[[]]"] * 1000) + "]"
    assert len(bounded.parse(wide, list)) == 1000
    assert bounded.parse('"' + "[" * 1000 + '"') == "[" * 1000
    with pytest.raises(ValueError, match="holds a list and no keys"):
        bounded.parse("[]", dict)


def test_nobody_else_parses_json():
    """The census: each reader of JSON is bounded, or reads its own child's words."""
    packages = ("haiku_template", "haiku_text", "jax_doctor")
    for path in [path for name in packages for path in ROOT.glob(f"{name}/**/*.py")]:
        name = str(Path(*path.relative_to(ROOT).parts[1:]))
        calls = {"load", "loads", "JSONDecoder"} if name not in ALONE else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in calls:
                assert getattr(node.value, "id", None) != "json", path
            if isinstance(node, ast.ImportFrom):
                assert node.module != "json", path

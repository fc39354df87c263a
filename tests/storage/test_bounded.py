"""Files of a workdir that others made: nothing hangs, recurses or fills memory."""

import ast
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from haiku_template import bounded
from haiku_template.config import of_run
from haiku_template.errors import ConfigError
from haiku_template.storage import workdir
from haiku_template.storage.checkpoint import check_plain
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


# In a process of its own: an audit hook stays.
HOSTILE = """
import io, json, os, pickle, sys, zipfile
from pathlib import Path
import numpy as np
from haiku_template.storage import Checkpoints

class Code:
    def __reduce__(self):
        return os.system, ("touch pwned",)

def saved(save, *args, **options):
    file = io.BytesIO()
    save(file, *args, **options)
    return file.getvalue()

def archive(file):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("a.npy", bytes(2**26))

contents = {
    "a pickle": pickle.dumps(Code()),
    "an array of objects": saved(np.save, np.array([Code()]), allow_pickle=True),
    "a bomb": saved(archive),
    "a long list": json.dumps({str(i): 0 for i in range(100_000)}).encode(),
    "paths": json.dumps({name: {"form": name, "files": {name: 1}} for name in (
        "../../../pwned", os.path.abspath("pwned"), "files")}).encode(),
    "a key twice": b'{"run": "a", "run": "b", "step": 4, "step": 2, "leaves": {}}',
}
step, heard, results = Path(sys.argv[1], "checkpoints/4"), [], {}

def hook(event, args):
    runs = event.startswith(("pickle.", "os.system", "os.exec", "os.spawn", "os.fork"))
    opens = event == "open" and "pwned" in str(args[0])
    if runs or opens or event in ("subprocess.Popen", "os.posix_spawn"):
        heard.append((event, str(args)[:200]))

with Checkpoints(step.parent) as checkpoints:
    checkpoints.verify(4)  # Imports what it needs.
    sys.addaudithook(hook)
    for file in sorted(x for x in step.rglob("*") if x.is_file()):
        before = file.read_bytes()
        for kind, content in contents.items():
            file.write_bytes(content)
            name = f"{file.relative_to(step)}, {kind}"
            try:
                checkpoints.verify(4)
                results[name] = "without effect"
            except Exception as error:
                results[name] = ("refused" if hasattr(error, "exit_code") else
                                 f"{type(error).__name__} {error}")
        file.write_bytes(before)
    checkpoints.verify(4)
print(json.dumps([heard, results]))
"""


@pytest.mark.slow
def test_hostile_files_in_a_checkpoint_run_no_code(tmp_path):
    """C38: what others may put there is refused, or nothing reads it."""
    run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heard, results = json.loads(done.stdout.splitlines()[-1])
    assert not heard and not (tmp_path / "pwned").exists()
    assert {*results.values()} == {"refused", "without effect"}
    unread = [name.split(", ")[0] for name, x in results.items() if x != "refused"]
    # Of the second the ids alone are read, if there are any.
    possible = {"commit_success.txt", "_CHECKPOINT_METADATA", "metrics"}
    assert {Path(name).name for name in unread} == possible


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


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_regular_file_is_not_opened(tmp_path, kind):
    """As `.lock` is, which both who runs and who asks open."""
    DAMAGE[kind](tmp_path / workdir.LOCK)
    with within(10, 300):
        with pytest.raises(OSError, match="is no regular file"):
            bounded.opened(tmp_path / workdir.LOCK)
        assert not workdir.is_locked(tmp_path)
        with pytest.raises(ConfigError, match="cannot be"), workdir.locked(tmp_path):
            pass


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


def test_a_folder_behind_a_link_is_no_part_of_a_checkpoint(tmp_path):
    (tmp_path / "4" / "state").mkdir(parents=True)
    check_plain(tmp_path / "4")
    (tmp_path / "4" / "state" / "all").symlink_to(tmp_path)
    with pytest.raises(OSError, match="all is no regular file"):
        check_plain(tmp_path / "4")


LOOKS = bounded.exists, bounded.is_file, bounded.is_dir, bounded.is_link


@pytest.mark.parametrize("look", LOOKS)
def test_what_cannot_be_looked_at_is_not_absent(tmp_path, look):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    there = {"is_file": {"file"}, "is_dir": {"."}, "is_link": {"loop"}}
    here = there.get(look.__name__, {"file", "."})
    for name in ("file", ".", "file/x", "none", "none/x", "loop", "a\0b"):
        assert look(tmp_path / name) is (name in here)
        assert look(str(tmp_path / name)) is (name in here)
    with pytest.raises(OSError, match="name too long"):
        look(tmp_path / ("x" * 300))

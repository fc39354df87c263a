"""Orbax trees of others, each of whose files is damaged in each way: never a hang."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

from haiku_template.errors import ConfigError
from haiku_template.pretrained import Tensor
from haiku_template.storage import trees
from tests.runs import ROOT

TREE = {"lin": {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2)}}


def write_pipe(path):
    os.mkfifo(path)


def write_endless(path):
    path.symlink_to("/dev/zero")


def write_deep(path):
    path.write_text("[" * 100_000)


def write_missing_link(path):
    path.symlink_to(path.with_name("nowhere"))


DAMAGE = {
    "a pipe": write_pipe,
    "endless": write_endless,
    "no target": write_missing_link,
    "empty": lambda path: path.touch(),
    "deep": write_deep,
}


@pytest.fixture(scope="module", params=[False, True], ids=["folders", "database"])
def saved(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("saved") / "tree"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, TREE)
    return folder


def read(folder):
    found = {}
    for leaf in trees.leaves(folder):
        found[leaf.name] = np.empty(leaf.shape, leaf.dtype)
        for part, values in leaf.read(Tensor(leaf.name, folder, "", leaf.shape, None)):
            found[leaf.name][part] = values
    return found


def assert_whole_or_refused(folder):
    try:
        found = read(folder)
    except ConfigError as error:
        assert "the Orbax tree in" in str(error) and "\n" not in str(error)
        return
    assert found.keys() == {"lin/w", "lin/b"}
    for name, leaf in TREE["lin"].items():
        np.testing.assert_array_equal(found[f"lin/{name}"], leaf)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_a_tree_is_a_sentence_or_has_no_effect(
    tmp_path, saved, damage
):
    for file in [path for path in saved.rglob("*") if path.is_file()]:
        name = file.relative_to(saved)
        if str(name) == trees.METADATA:
            continue  # By it a tree is known.
        copy = tmp_path / str(name).replace("/", "_")
        shutil.copytree(saved, copy)
        (copy / name).unlink()
        DAMAGE[damage](copy / name)
        assert_whole_or_refused(copy)


@pytest.mark.parametrize("chunks", [[2**31, 8], [2**36, 1], [2**40, 2**20]])
def test_chunks_that_are_larger_than_their_array_are_refused(tmp_path, saved, chunks):
    file = "lin.w/.zarray"
    if not (saved / file).is_file():
        pytest.skip("in a database the layout is no file")
    copy = tmp_path / "tree"
    shutil.copytree(saved, copy)
    layout = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(layout | {"chunks": chunks}))
    with pytest.raises(ConfigError, match=r"lin.w of shape \[3, 2\] has chunks of"):
        read(copy)


READS = "import pathlib, sys\nfrom tests.storage.test_damaged_trees import read\n"
READS += "read(pathlib.Path(sys.argv[1]))"


def rows_of_two_billions(file):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chunks": [2**31, 8]}))


def pipe_in_its_place(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage", [rows_of_two_billions, pipe_in_its_place], ids=["chunks", "pipe"]
)
def test_a_damaged_tree_ends_no_process_and_hangs_none(tmp_path, damage):
    """In a process of its own, which TensorStore would end for want of memory."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "tree", TREE)
    damage(tmp_path / "tree" / "lin.w" / ".zarray")
    done = subprocess.run(
        [sys.executable, "-c", READS, str(tmp_path / "tree")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stderr
    assert "ConfigError: the Orbax tree in" in done.stderr

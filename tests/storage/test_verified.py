"""What was saved is what is restored, or the step is named and an older one is used."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.faults import make_trainer
from haiku_template.devices import Layout
from haiku_template.errors import ConfigError, DamagedError, StorageError
from haiku_template.runs import Run, train
from haiku_template.storage import checkpoint
from haiku_template.storage import manifest as manifests
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.checkpoint import Checkpoints
from tests.runs import ROOT, run_command

RNG = np.random.default_rng(0)
TREE = {
    # Larger than what Orbax has in lists, which have a checksum.
    "params": {"lin": {"w": RNG.normal(size=600).astype(np.float32), "b": np.ones(3)}},
    "step": np.array(0, np.int32),
}


made = functools.cache(make_trainer)  # Which compiles its step once for all tests.


def run(path, num_steps=4):
    every = {"log_every": 1, "save_every": 2}
    return train(made(), num_steps=num_steps, workdir=path, **every)


def bits(state):
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(f"{jax.tree_util.keystr(path)}{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, and what it is after step 6."""
    folder = tmp_path_factory.mktemp("stopped")
    run(folder / "run")
    shutil.copytree(folder / "run", folder / "on")
    expected = bits(run(folder / "on", 6).state), lines(folder / "on")
    return folder / "run", expected


def lines(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def edit_manifest(step, **fields):
    """Changes fields of a manifest, and its digest with them."""
    file = step / "manifest/manifest"
    manifest = json.loads(file.read_text()) | fields
    file.write_text(json.dumps(manifests.sealed(manifest)))


def payload(step):
    """The file with the arrays' bits."""
    files = [path for path in step.glob("state/ocdbt.*/d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip_payload(step):
    file = payload(step)
    flip(file, file.stat().st_size * 4)


def copy_state(step):
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name("2") / "state", step / "state")


def copy_state_and_manifest(step):
    copy_state(step)
    manifest = step.with_name("2") / "manifest/manifest"
    shutil.copy(manifest, step / "manifest/manifest")


def replace_in(name, old, new):
    def replace(step):
        text = (step / name).read_text()
        assert old in text
        (step / name).write_text(text.replace(old, new, 1))

    return replace


DAMAGE = {
    "bit": flip_payload,
    "cut": lambda step: os.truncate(payload(step), payload(step).stat().st_size // 2),
    "empty": lambda step: os.truncate(payload(step), 0),
    "no payload": lambda step: payload(step).unlink(),
    "no arrays": lambda step: shutil.rmtree(step / "state"),
    "no list": lambda step: (step / "state/_METADATA").unlink(),
    "no manifest": lambda step: (step / "manifest/manifest").unlink(),
    "cut manifest": lambda step: os.truncate(step / "manifest/manifest", 100),
    "another digest": replace_in("manifest/manifest", '"digest": "', '"digest": "0'),
    "another form": replace_in("manifest/manifest", "float32", "float16"),
    "no leaves": replace_in("manifest/manifest", "leaves", "leavez"),
    "another id": replace_in("manifest/manifest", '"run": "', '"run": "0'),
    "arrays of step 2": copy_state,
    "arrays and manifest of step 2": copy_state_and_manifest,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_names_a_damaged_step_and_goes_on_from_the_one_before(
    tmp_path, caplog, stopped, damage
):
    source, (expected, losses) = stopped
    shutil.copytree(source, tmp_path / "run")
    DAMAGE[damage](tmp_path / "run/checkpoints/4")
    altered = {p.name for p in (tmp_path / "run/checkpoints/4").rglob("*")}
    assert bits(run(tmp_path / "run", 6).state) == expected
    assert lines(tmp_path / "run") == losses
    warning = next(x for x in caplog.messages if "4.damaged" in x)
    assert "step 4" in warning or "checkpoints/4 is not" in warning
    assert "is called 4.damaged now, and the run goes on from step 2" in warning
    assert "\n" not in warning
    folder = tmp_path / "run/checkpoints"
    assert {p.name for p in (folder / "4.damaged").rglob("*")} == altered
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps == [4, 6]


def test_ids_that_orbax_lost_are_those_of_the_manifest(tmp_path):
    with Checkpoints(tmp_path, run="a") as checkpoints:
        checkpoints.save(0, TREE, None)
    file = tmp_path / "0/_CHECKPOINT_METADATA"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"custom_metadata": {}}))
    with Checkpoints(tmp_path, run="a") as checkpoints:
        assert bits(checkpoints.restore(0, TREE)) == bits(TREE)
    with (
        Checkpoints(tmp_path, run="b") as checkpoints,
        pytest.raises(StorageError, match="of another run"),
    ):
        checkpoints.restore(0, TREE)


def test_the_leaf_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, TREE, None)
        checkpoints.wait()
        flip_payload(tmp_path / "0")
        with pytest.raises(DamagedError) as caught:
            checkpoints.restore(0, TREE)
    sentence = str(caught.value)
    assert "is damaged: DATA_LOSS: " in sentence and '"params.lin.w/c/0"' in sentence
    assert "Digest mismatch" in sentence and "\n" not in sentence


def test_bits_that_orbax_takes_for_right_are_compared_with_their_digest(tmp_path):
    """Arrays of another save, whose checksums are theirs."""
    other = jax.tree.map(lambda x: x + 1 if x.ndim else x, TREE)
    for name, tree in (("a", TREE), ("b", other)):
        with Checkpoints(tmp_path / name, run="r") as checkpoints:
            checkpoints.save(0, tree, None)
    shutil.rmtree(tmp_path / "a/0/state")
    shutil.copytree(tmp_path / "b/0/state", tmp_path / "a/0/state")
    edit_manifest(tmp_path / "a/0", files=manifests.sizes(tmp_path / "a/0"))
    with Checkpoints(tmp_path / "a", run="r") as checkpoints:
        with pytest.raises(DamagedError) as caught:
            checkpoints.restore(0, TREE)
        with pytest.raises(DamagedError, match="1 of 2 .*: params/lin/w"):
            w = {"lin": {"w": TREE["params"]["lin"]["w"]}}
            checkpoints.restore(0, w, "params", skip=["lin/b"])
    assert str(caught.value).endswith(
        "is damaged: 2 of 3 leaves are not what was saved: params/lin/b, params/lin/w"
    )


def test_an_error_of_a_device_is_no_damage_of_a_checkpoint(
    tmp_path, monkeypatch, stopped
):
    """A run set the newest aside, and went on from an older one."""
    shutil.copytree(stopped[0], tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    before = sorted(x.name for x in folder.iterdir())

    def altered(manifest, state):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE")

    monkeypatch.setattr(checkpoint.manifests, "altered", altered)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ECC_UNCORRECTABLE"):
        run(tmp_path / "run", 6)
    assert sorted(x.name for x in folder.iterdir()) == before


def test_an_error_of_the_disk_that_passes_is_no_damage(
    tmp_path, monkeypatch, caplog, stopped
):
    source, (expected, _) = stopped
    shutil.copytree(source, tmp_path / "run")
    errors, read = [OSError(5, "Input/output error")], checkpoint.manifests.read

    def read_at_last(folder):
        if errors:
            raise errors.pop()
        return read(folder)

    monkeypatch.setattr(checkpoint.manifests, "read", read_at_last)
    assert bits(run(tmp_path / "run", 6).state) == expected
    assert not errors and "damaged" not in caplog.text


def test_a_save_is_on_the_disk_before_an_older_one_is_removed(tmp_path, monkeypatch):
    synced, removed, fsync, remove = set(), [], os.fsync, checkpoint.remove

    def note(file):
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    def compare(folder):
        newest = tmp_path / "1"
        files = {newest.parent, newest, *newest.rglob("*")}
        assert len(files) > 10 and set(map(str, files)) <= synced
        removed.append(folder.name)
        remove(folder)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(checkpoint, "remove", compare)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in range(2):
            checkpoints.save(step, TREE | {"step": np.array(step, np.int32)}, None)
    assert removed == ["0"]


def verdicts(workdir, *flags):
    done = run_command("checkpoints", f"--workdir={workdir}", *flags)
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    return done.returncode, {step: rest for _, step, rest in lines}, done.stderr


def test_the_command_lists_verifies_and_repairs(tmp_path, stopped):
    source, (expected, _) = stopped
    shutil.copytree(source, tmp_path / "run")
    assert verdicts(tmp_path / "run") == (0, {"2": "verified", "4": "verified"}, "")
    flip_payload(tmp_path / "run/checkpoints/4")
    code, lines, errors = verdicts(tmp_path / "run")
    assert code == 74 and lines["2"] == "verified"
    assert "step 4 in" in lines["4"] and "is damaged: " in lines["4"]
    assert "1 of 2 checkpoints cannot be used" in errors
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["2", "4"]
    with workdirs.locked(tmp_path / "run"):
        code, _, errors = verdicts(tmp_path / "run", "--repair")
        assert code == 64 and "a run is writing to" in errors
    code, lines, _ = verdicts(tmp_path / "run", "--repair")
    assert code == 0 and lines["4"].endswith("; it is called 4.damaged now")
    assert verdicts(tmp_path / "run") == (0, {"2": "verified"}, "")
    assert bits(run(tmp_path / "run", 6).state) == expected
    code, _, errors = verdicts(tmp_path)
    assert code == 64 and "holds no checkpoints" in errors


def test_a_run_without_a_whole_step_stops_and_moves_nothing(tmp_path, stopped):
    source, _ = stopped
    shutil.copytree(source, tmp_path / "run")
    for step in "24":
        flip_payload(tmp_path / "run/checkpoints" / step)
    before = {p: p.stat().st_size for p in tmp_path.rglob("checkpoints/**/*")}
    with pytest.raises(StorageError, match=r"none .* steps \[2, 4\] is whole") as info:
        run(tmp_path / "run", 6)
    assert info.value.exit_code == 74
    assert "of step 2 in" in str(info.value) and "of step 4 in" in str(info.value)
    assert {p: p.stat().st_size for p in tmp_path.rglob("checkpoints/**/*")} == before


def test_a_second_damage_of_a_step_is_set_aside_beside_the_first(tmp_path, stopped):
    source, (expected, _) = stopped
    shutil.copytree(source, tmp_path / "run")
    for _ in range(2):
        flip_payload(tmp_path / "run/checkpoints/4")
        run(tmp_path / "run", 4)
    assert len([*tmp_path.glob("run/checkpoints/4.damaged*")]) == 2
    assert bits(run(tmp_path / "run", 6).state) == expected


def test_reading_moves_nothing_and_uses_an_older_step_unless_one_is_named(
    tmp_path, caplog, stopped
):
    source, _ = stopped
    shutil.copytree(source, tmp_path / "run")
    flip_payload(tmp_path / "run/checkpoints/4")
    devices = made().devices

    def opened(which):
        return Run.open(tmp_path / "run", devices, which, made().experiment)

    assert opened("latest").step == 2
    assert "checkpoint of step 4" in caplog.text and "step 2 is used" in caplog.text
    with pytest.raises(DamagedError, match="checkpoint of step 4 .* is damaged"):
        _ = opened("4").step
    with pytest.raises(ConfigError, match="best"):
        _ = opened("best").step
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["2", "4"]


def test_a_checkpoint_without_a_manifest_is_restored(tmp_path, monkeypatch):
    """As versions before saved them."""
    composite = checkpoint.ocp.args.Composite
    monkeypatch.setattr(
        checkpoint.ocp.args,
        "Composite",
        lambda manifest=None, **items: composite(**items),
    )
    monkeypatch.setattr(checkpoint.manifests, "MANIFEST", "run")  # Not in the ids.
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, TREE, None)
    monkeypatch.undo()
    assert not (tmp_path / "0/manifest").exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert bits(checkpoints.restore(0, TREE)) == bits(TREE)


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "bool", "uint32"])
def test_leaves_of_each_kind_are_verified_on_several_devices(
    tmp_path, four_devices, kind
):
    state = {
        "sharded": jnp.arange(32).reshape(8, 4).astype(kind),
        "replicated": jnp.ones((3,), kind),
        "scalar": jnp.ones((), kind),
    }
    layout = Layout(four_devices.devices, (("sharded", "data"),))
    placed = four_devices.init(lambda: state, layout=layout)
    shapes = four_devices.abstract(lambda: state, layout=layout)
    assert not placed["sharded"].is_fully_replicated
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, placed, None)
        checkpoints.wait()
        assert bits(checkpoints.restore(1, shapes)) == bits(state)
    file = tmp_path / "1/manifest/manifest"
    manifest = json.loads(file.read_text())
    assert manifest["step"] == 1 and manifest["leaves"].keys() == state.keys()
    for name in state:
        entry = manifest["leaves"][name] | {"digest": "0" * 32}
        edit_manifest(tmp_path / "1", leaves=manifest["leaves"] | {name: entry})
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(DamagedError, match=f"1 of 3 .* saved: {name}"),
        ):
            checkpoints.restore(1, shapes)
        file.write_text(json.dumps(manifest))


TAKEN = """
import shutil, sys
from pathlib import Path
from types import SimpleNamespace
from haiku_template import checkpoints
from haiku_template.storage import Checkpoints

verify = Checkpoints.verify

def taken(self, step):
    if step == 2:
        shutil.rmtree(self.directory / "2")
    return verify(self, step)

Checkpoints.verify = taken
checkpoints.FLAGS = SimpleNamespace(workdir=sys.argv[1], repair=False)
checkpoints.main()
"""


def test_a_step_that_a_live_run_takes_away_is_no_damage(tmp_path, stopped):
    shutil.copytree(stopped[0], tmp_path / "run")
    command = [sys.executable, "-c", TAKEN, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["4"]

"""Facts of the run that are saved with a step, and compared as it resumes: row C06."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from haiku_template.devices import DeviceManager
from haiku_template.errors import DamagedError
from haiku_template.runs import resume
from haiku_template.storage import manifest as manifests
from haiku_template.storage.checkpoint import Checkpoints
from tests.runs import with_data
from tests.storage.test_verified import TREE, bits, edit_manifest, made, run, train


def manifest_of(step):
    return json.loads((step / "manifest/manifest").read_text())


def warnings(caplog):
    return [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]


def test_a_save_has_the_facts_of_its_run_and_its_files(tmp_path):
    run(tmp_path)
    step = tmp_path / "checkpoints/4"
    manifest = manifest_of(step)
    facts = manifest["facts"]
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment.pop("started") and environment.pop("num_steps") == 4
    assert facts["environment"] == environment
    packages = {"jax", "jaxlib", "dm-haiku", "optax", "numpy"}
    assert packages <= environment["packages"].keys() and environment["python"]
    assert environment["device_kind"] and "XLA_FLAGS" in environment["flags"]
    batch = made().experiment.data.train.batch(4)
    assert facts["batch"] == manifests.digest_of_batch(batch)
    assert len(facts["config"]) == 32
    files = [p for p in step.glob("state/**/*") if p.is_file()]
    files = {str(p.relative_to(step)): p.stat().st_size for p in files}
    assert {k: x for k, x in files.items() if "commit" not in k} == manifest["files"]


def test_what_changed_in_the_environment_is_one_line(tmp_path, caplog, monkeypatch):
    """C06: versions, devices and flags."""
    run(tmp_path)
    step = tmp_path / "checkpoints/4"
    facts = manifest_of(step)["facts"]
    packages = facts["environment"]["packages"] | {"jaxlib": "0.4.0"}
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    changes = {"packages": packages, "flags": flags, "device_kind": "H100"}
    facts["environment"] |= changes
    edit_manifest(step, facts=facts)
    run(tmp_path, 6)
    (line,) = warnings(caplog)
    assert line.startswith("this run's environment changed: device_kind: 'H100' there,")
    assert "packages.jaxlib: '0.4.0' there, " in line
    assert "flags.XLA_FLAGS: '--xla_cpu_enable_fast_math=true' there, " in line
    caplog.clear()
    run(tmp_path, 8)
    assert not warnings(caplog)


def test_another_number_of_devices_is_in_that_line(tmp_path, caplog):
    """C06: a run of one device, resumed on two."""
    run(tmp_path)
    two = made().experiment.trainer(DeviceManager.create("cpu", num_devices=2))
    train(two, num_steps=6, workdir=tmp_path, log_every=1, save_every=2)
    (line,) = warnings(caplog)
    assert line.startswith("this run's environment changed: ") and "\n" not in line
    assert line.endswith("; num_devices: 1 there, 2 now")
    caplog.clear()
    train(two, num_steps=8, workdir=tmp_path, log_every=1, save_every=2)
    assert not warnings(caplog)


def test_data_that_changed_are_noticed(tmp_path, caplog):
    """Where the fingerprint does not look: not in the first batch, nor at the ends."""
    run(tmp_path)
    data = made().experiment.data.train
    rows = {0, 31, *data.rows(0)}
    row = next(row for row in data.rows(4) if row not in rows)
    inputs = data.inputs.copy()
    inputs[row, 0] = np.nextafter(inputs[row, 0], 1)
    changed = with_data(made(), train=dataclasses.replace(data, inputs=inputs))
    train(changed, num_steps=6, workdir=tmp_path, log_every=1, save_every=2)
    (line,) = warnings(caplog)
    assert line.startswith("the batch of step 5 is not what it was when step 4 was ")
    caplog.clear()
    train(changed, num_steps=8, workdir=tmp_path, log_every=1, save_every=2)
    assert not warnings(caplog)


def test_a_data_set_that_is_no_function_of_the_step_is_not_asked(tmp_path, caplog):
    class Set:
        def __init__(self):
            self.steps = []

        def batch(self, step):
            self.steps.append(step)
            return made().experiment.data.train.batch(step)

    for stop in (4, 6):
        data = Set()
        trainer = with_data(made(), train=data)
        train(trainer, num_steps=stop, workdir=tmp_path, log_every=1, save_every=2)
        assert max(data.steps) == stop - 1
        assert manifest_of(tmp_path / f"checkpoints/{stop}")["facts"]["batch"] is None
    assert not warnings(caplog)


def test_an_edited_config_is_noticed_and_what_may_change_is_not():
    config = {"seed": 1, "num_steps": 10, "model": {"name": "mlp"}}
    digest = resume._digest_of_config(config)
    assert resume._digest_of_config(config | {"num_steps": 20}) == digest
    assert resume._digest_of_config(config | {"precision": "float32"}) == digest
    assert resume._digest_of_config(config | {"seed": 2}) != digest


def test_a_config_of_another_save_is_a_warning(tmp_path, caplog):
    run(tmp_path)
    step = tmp_path / "checkpoints/4"
    edit_manifest(step, facts=manifest_of(step)["facts"] | {"config": "0" * 32})
    run(tmp_path, 6)
    assert warnings(caplog) == ["config.json is not the one that step 4 was saved with"]


def test_moments_that_an_earlier_version_sharded_are_no_other_config(tmp_path, caplog):
    """Its digests have the key, which may change since."""
    run(tmp_path)
    step = tmp_path / "checkpoints/4"
    text = b'{"optimizer.shard_moments": true}'
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    edit_manifest(step, facts=manifest_of(step)["facts"] | {"config": digest})
    run(tmp_path, 6)
    assert not warnings(caplog)


def test_a_missing_or_cut_file_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, TREE, None)
        checkpoints.wait()
        files = manifest_of(tmp_path / "0")["files"]
        name, size = next((k, x) for k, x in files.items() if "/d/" in k)
        data = (tmp_path / "0" / name).read_bytes()
        (tmp_path / "0" / name).write_bytes(data + b"0")
        more = f"{name} has {size + 1:,} bytes, and had {size:,}"
        with pytest.raises(DamagedError, match=more):
            checkpoints.restore(0, TREE)
        (tmp_path / "0" / name).unlink()
        with pytest.raises(DamagedError, match=f"{name} is missing, and had {size:,}"):
            checkpoints.restore(0, TREE)


def test_a_manifest_of_an_earlier_version_is_read(tmp_path, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, TREE, None)
    file = tmp_path / "0/manifest/manifest"
    manifest = json.loads(file.read_text())
    earlier = {name: manifest[name] for name in manifests.FIELDS}
    file.write_text(json.dumps(earlier))
    with Checkpoints(tmp_path) as checkpoints:
        assert bits(checkpoints.restore(0, TREE)) == bits(TREE)
        assert checkpoints.saved_facts(0) == {} and checkpoints.verify(0)
    resume._warn_of_changes(0, {}, {"environment": {}, "config": "", "batch": ""}, {})
    assert not warnings(caplog)


@pytest.mark.parametrize("name", ["facts", "files", "step", "leaves"])
def test_no_field_of_a_manifest_can_be_changed_alone(tmp_path, name):
    with Checkpoints(tmp_path, facts=lambda step: {"a": step}) as checkpoints:
        checkpoints.save(0, TREE, None)
    file = tmp_path / "0/manifest/manifest"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {name: "another"}))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(DamagedError, match="other fields than it was saved with|step"),
    ):
        checkpoints.restore(0, TREE)

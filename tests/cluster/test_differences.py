"""What differs in one process of a run is a sentence before the first step, in all."""

import os
import shutil
import subprocess

import pytest

from tests.cluster.test_several import ENVIRONMENT, ROOT, command

pytestmark = pytest.mark.cluster


def refused(address, workdir, *, cwd=ROOT, flags=(), variables=None, **changes):
    """Errors of two processes; the second has another folder, flags or variables."""
    shared = [f"--coordinator_address={address}", "--num_processes=2"]
    runs = []
    for index in range(2):
        other = index == 1
        runs.append(
            subprocess.Popen(
                [
                    *command(workdir, 1, **changes),
                    *(flags if other else ()),
                    *(*shared, f"--process_id={index}"),
                ],
                cwd=cwd if other else ROOT,
                env=ENVIRONMENT
                | {"PYTHONPATH": str(cwd if other else ROOT)}
                | ((variables or {}) if other else {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [run.communicate(timeout=250)[1] for run in runs]
    assert [run.returncode for run in runs] == [64, 64], errors
    assert not any("Traceback" in words for words in errors)
    assert not any(workdir.glob("checkpoints/*"))
    return errors


def assert_named(errors, name):
    for words in errors:
        assert f"the processes of a run differ in {name}: " in words


def copy_of_the_template(folder, file, before, after):
    """A clone with another line in one file, as of a stale image."""
    for path in ROOT.iterdir():
        if path.name not in ("haiku_template", ".git"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "haiku_template", folder / "haiku_template")
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))


EDITS = {
    "model": (
        "haiku_template/models/mlp.py",
        "[num_outputs])",
        "[num_outputs], activation=jax.nn.tanh)",
        "the fingerprint of the train step",
    ),
    "initial parameters": (
        "haiku_template/models/mlp.py",
        "[num_outputs])",
        "[num_outputs], w_init=hk.initializers.Constant(0.1))",
        "the fingerprint of the first parameters",
    ),
    "data": (
        "haiku_template/data/dataset.py",
        "(spec.seed, 0, epoch)",
        "(spec.seed, 7, epoch)",
        "the fingerprint of the first batch of the training data",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_other_code_of_the_template(tmp_path, address, edit):
    folder = tmp_path / "clone"
    folder.mkdir()
    *change, name = EDITS[edit]
    copy_of_the_template(folder, *change)
    assert_named(refused(address, tmp_path / "run", cwd=folder), name)


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("JAX_ENABLE_X64", "1", "jax_enable_x64"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16", "jax_default_matmul_precision"),
        ("JAX_THREEFRY_PARTITIONABLE", "0", "jax_threefry_partitionable"),
        ("JAX_NUMPY_DTYPE_PROMOTION", "strict", "jax_numpy_dtype_promotion"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true", "XLA_FLAGS"),
        ("NVIDIA_TF32_OVERRIDE", "0", "NVIDIA_TF32_OVERRIDE"),
    ],
)
def test_other_options(tmp_path, address, variable, value, name):
    given = {variable: f"{os.environ.get(variable, '')} {value}".strip()}
    assert_named(refused(address, tmp_path / "run", variables=given), name)


def test_a_dry_run_of_one(tmp_path, address):
    errors = refused(address, tmp_path / "run", flags=["--dry_run"])
    assert_named(errors, "--dry_run")


@pytest.mark.parametrize(
    "flag", ["--profile=2:4", "--rewind=3", "--fit=apply", "--device_memory_limit=8GiB"]
)
def test_other_flags(tmp_path, address, flag):
    errors = refused(address, tmp_path / "run", flags=[flag])
    assert_named(errors, flag.partition("=")[0])


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ("contents", "first and last rows of the training data"),
        ("evaluation", "last batch of the evaluation data"),
        ("shuffled", "first batch of the training data"),
    ],
)
def test_other_data(tmp_path, address, data, part):
    changes = {"data.name": f"tests.cluster.unequal:{data}"}
    errors = refused(address, tmp_path / "run", **changes)
    assert_named(errors, f"the fingerprint of the {part}")


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("num_steps", 30)])
def test_other_keys_of_the_config(tmp_path, address, key, value):
    errors = refused(address, tmp_path / "run", flags=[f"--config.{key}={value}"])
    assert_named(errors, f"config.{key}")

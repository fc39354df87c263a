"""Compiled programs of commands stay in the user's cache folder, and change no bit."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from haiku_template import program_cache
from haiku_template.devices import DeviceManager
from haiku_template.params import flatten
from haiku_template.runs import Run
from tests.runs import ROOT, UNDRAWN

FLAGS = ["--config=configs/digits.py", "--device=cpu", "--config.log_every=1"]
FLAGS += ["--config.optimizer.schedule=constant", "--config.optimizer.warmup_steps=0"]
FLAGS += ["--config.eval_every=10", "--config.save_every=10"]


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A user's cache folder, and a JAX that was told nothing of one."""
    names = ["jax_compilation_cache_dir", program_cache.SECONDS]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    for name in names:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    yield tmp_path / "caches"
    for name, value in before.items():
        jax.config.update(name, value)


def folder_in_use():
    program_cache.use()
    return jax.config.jax_compilation_cache_dir


def test_it_is_the_users_own(caches):
    folder = caches / "haiku_template" / "programs"
    assert folder_in_use() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert getattr(jax.config, program_cache.SECONDS) == 0


def test_without_a_variable_it_is_in_the_home(caches, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(caches / "home"))
    assert folder_in_use() == str(caches / "home/.cache/haiku_template/programs")


def test_what_the_user_told_jax_holds(caches, monkeypatch):
    monkeypatch.setenv(program_cache.SECONDS.upper(), "2")
    jax.config.update(program_cache.SECONDS, 2.0)
    assert folder_in_use() is not None
    assert getattr(jax.config, program_cache.SECONDS) == 2
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    assert folder_in_use() == "elsewhere"


def test_it_can_be_turned_off(caches):
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        assert folder_in_use() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not caches.exists()


def test_who_dumps_programs_compiles_them(caches, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=dumps")
    assert folder_in_use() is None


def no_folder(path, monkeypatch):
    path.mkdir(parents=True)
    (path / "haiku_template").write_text("a file")


def written_by_all(path, monkeypatch):
    (path / "haiku_template" / "programs").mkdir(parents=True)
    (path / "haiku_template" / "programs").chmod(0o777)


def of_another_user(path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)


def on_a_full_disk(path, monkeypatch):
    monkeypatch.setattr(program_cache, "LARGEST", 2**70)


def without_a_home(path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", fail)


def fail():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    "make",
    [no_folder, written_by_all, of_another_user, on_a_full_disk, without_a_home],
    ids=lambda make: make.__name__,
)
def test_where_it_cannot_be_had_a_run_is_without(caches, monkeypatch, make):
    make(caches, monkeypatch)
    assert folder_in_use() is None


def test_what_was_read_longest_ago_goes_first(tmp_path):
    for n, size in enumerate((60, 10, 10, 10)):
        path = tmp_path / ("inner" if n == 1 else "") / f"{n}-cache"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (1000 - n, 900))
    os.utime(tmp_path / "0-cache", (1, 1))
    program_cache.prune(tmp_path, 90, 4)
    assert {p.name for p in tmp_path.rglob("*-cache")} == {
        f"{n}-cache" for n in range(4)
    }
    program_cache.prune(tmp_path, 89, 4)
    assert {p.name for p in tmp_path.rglob("*-cache")} == {
        "1-cache",
        "2-cache",
        "3-cache",
    }
    program_cache.prune(tmp_path, 89, 2)
    assert {p.name for p in tmp_path.rglob("*-cache")} == {"1-cache", "2-cache"}


def train(workdir, caches, num_steps, devices, **variables):
    """Trains by the command of a user who has told JAX nothing."""
    told = {"JAX_COMPILATION_CACHE_DIR", program_cache.SECONDS.upper()}
    environment = {k: v for k, v in os.environ.items() if k not in told}
    environment |= {"PYTHONPATH": UNDRAWN, "XDG_CACHE_HOME": str(caches)} | variables
    done = subprocess.run(
        [
            *(sys.executable, "-m", "haiku_template.train", *FLAGS),
            *(f"--workdir={workdir}", f"--config.num_steps={num_steps}"),
            f"--simulate_devices={devices}",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def results(workdir):
    """The state of the last checkpoint, and the metrics but for speeds."""
    devices = DeviceManager.create("cpu", num_devices=1)
    state = flatten(Run.open(workdir, devices).state)
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    rows = [{k: v for k, v in row.items() if "perf/" not in k} for row in lines]
    return {name: np.asarray(x).tobytes() for name, x in state.items()}, rows


KILLED = """
import os, sys
import jax, jax.numpy as jnp
from haiku_template import program_cache
program_cache.use()
from jax._src.lru_cache import LRUCache
cache = type(LRUCache(sys.argv[1], max_size=-1).path)
write = cache.write_bytes
def write_half(path, data):
    write(path, data[: len(data) // 2])
    os._exit(9)
if sys.argv[2] == "killed":
    cache.write_bytes = write_half
print(jax.jit(lambda x: x + 1)(jnp.zeros(3)))
"""


def test_a_process_that_is_killed_as_it_writes_leaves_no_half_program(caches):
    """JAX writes no entry again, and would warn of it for ever."""
    folder = caches / "haiku_template/programs"
    for when, code in (("killed", 9), ("then", 0), ("later", 0)):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), when],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=100,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Error reading" not in done.stderr
        entries = [path.name for path in folder.glob("jit*-cache")]
        assert bool(entries) is (when != "killed")


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_programs_read_from_it_have_the_same_bits(tmp_path, devices):
    caches = tmp_path / "caches"
    train(tmp_path / "none", caches, 20, devices, JAX_ENABLE_COMPILATION_CACHE="0")
    assert not caches.exists()
    assert "Error" not in train(tmp_path / "run", caches, 10, devices)
    assert "Error" not in train(tmp_path / "run", caches, 20, devices)  # Resumes.
    assert len([*caches.rglob("jit_train_step-*-cache")]) == 1
    assert results(tmp_path / "run") == results(tmp_path / "none")
    for path in caches.rglob("*-cache"):
        os.truncate(path, path.stat().st_size // 2)
    errors = train(tmp_path / "damaged", caches, 20, devices)
    assert "Error reading persistent compilation cache entry" in errors
    assert results(tmp_path / "damaged") == results(tmp_path / "none")

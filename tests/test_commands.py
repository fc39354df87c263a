"""The commands as a user runs them: real processes, files, signals and exit codes."""

import functools
import gzip
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.runs import UNDRAWN, run_command

ROOT = Path(__file__).parents[1]
SHORT = ("--config.num_steps=40", "--config.optimizer.warmup_steps=10")


def command(name, *flags):
    return [sys.executable, "-m", f"haiku_template.{name}", *flags]


def train(workdir, *flags, config="configs/digits.py", **options):
    return run_command(
        "train", f"--config={config}", f"--workdir={workdir}", *flags, **options
    )


def assert_refused(done, code, *words):
    """One sentence, no traceback, the right exit code."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def digest(workdir):
    """Of everything in the last checkpoint, through the library that wrote it."""
    last = max((workdir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    found = hashlib.sha256()
    with warnings.catch_warnings():
        # It has the shardings from a file; here are at least as many devices.
        warnings.filterwarnings("ignore", "Sharding info not provided")
        state = ocp.load(last)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        leaf = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(leaf.tobytes())
    return last.name, found.hexdigest()


def numbers(workdir):
    """metrics.jsonl, less what depends on the machine's speed."""
    rows = [json.loads(s) for s in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith("perf/")}
        for row in rows
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run on four simulated devices."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    drawn = {"PYTHONPATH": str(ROOT)}  # With the real matplotlib.
    done = train(workdir, *SHORT, "--simulate_devices=4", **drawn)
    assert done.returncode == 0, done.stderr
    return workdir, done


def test_a_run_shows_devices_parameters_batch_and_progress(finished):
    workdir, done = finished
    for words in (
        "4 x cpu: cpu:0, cpu:1, cpu:2, cpu:3. --simulate_devices=4",
        "mlp/~/linear_0/w",
        "cpu:0-3 replicated",
        "128 examples, 32 on each device",
        "step     40/40  loss",
        "examples/s  ETA 0:00  bound by ",
        "step     40/40  eval loss",
        "report.png",
    ):
        assert words in done.stdout
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_workdir_holds_everything(finished):
    workdir, _ = finished
    assert {path.name for path in workdir.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.json",
        "env.json",
        "goodput.jsonl",
        "metrics.jsonl",
        "report.png",
        "run.json",
        "tensorboard",
        "train.log",
    }
    assert (workdir / "report.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((workdir / "config.json").read_text())
    assert config["num_steps"] == 40 and config["optimizer"]["clip_norm"] == 1.0


@pytest.mark.slow(but="best")
@pytest.mark.parametrize(
    ("which", "devices"),
    [("latest", ()), ("best", ("--simulate_devices=3",)), ("40", ())],
)
def test_evaluate_gives_the_run_s_metrics_on_other_devices(finished, which, devices):
    workdir, _ = finished
    done = run_command(
        "evaluate", f"--workdir={workdir}", f"--checkpoint={which}", *devices
    )
    assert done.returncode == 0, done.stderr
    last = numbers(workdir)[-1]
    assert json.loads(done.stdout) == pytest.approx(last, abs=1e-6)


@pytest.fixture(scope="module")
def predicted(finished, tmp_path_factory):
    """The arrays that `predict` writes to a file of this name, on some devices."""
    workdir, _ = finished

    @functools.cache
    def predict(name, *devices):
        file = tmp_path_factory.mktemp("predicted") / "new" / name
        flags = (f"--workdir={workdir}", "--checkpoint=best", f"--output={file}")
        done = run_command("predict", *flags, *devices)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{file}: 360 examples, step 40 of {workdir}\n"
        assert list(file.parent.iterdir()) == [file]
        if file.suffix == ".npz":
            return dict(np.load(file))
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return {key: np.array([row[key] for row in rows]) for key in rows[0]}

    return predict


DEVICES = [(), ("--simulate_devices=3",)]


@pytest.mark.slow(but="npz-3")
@pytest.mark.parametrize("devices", DEVICES, ids=["1", "3"])
@pytest.mark.parametrize("name", ["out.npz", "out.jsonl"])
def test_predict_writes_each_example_s_outputs_in_order(
    finished, predicted, name, devices
):
    """Of 360, in batches of 128: the last is ragged, and none splits over three."""
    workdir, _ = finished
    saved = predicted(name, *devices)
    assert saved["outputs"].shape == (360, 10) and len(saved["labels"]) == 360
    accuracy = (saved["outputs"].argmax(axis=1) == saved["labels"]).mean()
    assert accuracy == pytest.approx(numbers(workdir)[-1]["eval/accuracy"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", DEVICES, ids=["1", "3"])
def test_predict_writes_the_same_in_either_format(predicted, devices):
    npz, jsonl = (predicted(name, *devices) for name in ("out.npz", "out.jsonl"))
    for name in ("outputs", "labels"):
        np.testing.assert_array_equal(npz[name], jsonl[name])


def test_predict_refuses_what_it_cannot_write(finished, tmp_path):
    workdir, _ = finished
    flags = (f"--workdir={workdir}", f"--output={tmp_path / 'out.txt'}")
    words = "out.txt", ".npz", ".jsonl", ".csv"
    assert_refused(run_command("predict", *flags), 64, *words)
    there = tmp_path / "there.npz"
    there.touch()
    flags = (f"--workdir={workdir}", f"--output={there}")
    assert_refused(
        run_command("predict", *flags), 64, "exists", "nothing is overwritten"
    )


@pytest.mark.slow
def test_the_same_command_again_changes_nothing(finished):
    workdir, _ = finished
    before = digest(workdir), numbers(workdir)
    done = train(workdir, *SHORT, "--simulate_devices=4")
    assert done.returncode == 0 and "resumed at step 40" in done.stdout
    assert (digest(workdir), numbers(workdir)) == before


def test_another_config_stops_with_the_differences_and_writes_nothing(finished):
    workdir, _ = finished

    def files():
        return {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in workdir.rglob("*")
            if path.is_file()
        }

    before = files()
    done = train(workdir, *SHORT, "--config.optimizer.learning_rate=0.5")
    assert_refused(done, 64, "optimizer.learning_rate: 0.001 there, 0.5 now")
    assert files() == before


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ("", "A20"),
        ("cuda", "A40"),
        ("gpu", "A41"),
        ("cuda,cpu", "A42"),
        ("cpu,cuda", "A43"),
        ("cuda, cpu", "A44"),
    ],
)
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a card")
def test_a_gpu_that_cannot_be_used_is_refused_at_once_with_the_cause(
    tmp_path, value, row
):
    begun = time.monotonic()
    done = train(tmp_path / "run", "--device=gpu", JAX_PLATFORMS=value)
    assert time.monotonic() - begun < 5
    assert_refused(done, 69, f"[{row}]", "fix:")
    assert not (tmp_path / "run").exists()


def test_targets_are_listed_and_are_for_a_dry_run_alone(tmp_path):
    listed = run_command("train", "--target=list")
    assert listed.returncode == 0 and "h100       NVIDIA H100" in listed.stdout
    done = train(tmp_path / "run", "--target=h100x8")
    assert_refused(done, 64, "--target=h100x8", "not here", "--dry_run")
    done = train(tmp_path / "run", "--target=,", "--dry_run")
    assert_refused(done, 64, "--target= is not known", "possible are")
    flags = ("--target=h100x8", "--dry_run", "--device=cpu", "--num_devices=1")
    done = train(tmp_path / "run", *flags)
    assert_refused(done, 64, "--target=h100x8", "leave out --device, --num_devices")


SCRIPT = """
from absl import flags
from haiku_template import cli
flags.DEFINE_string("target", "price", "The column to predict.")
cli.run(lambda: print(cli.device_manager().describe(), flags.FLAGS.target))
"""


def test_a_script_may_have_a_flag_of_its_own_for_targets():
    command = [sys.executable, "-c", SCRIPT, "--device=cpu", "--num_devices=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 x cpu: cpu:0.") and "price" in done.stdout


def test_the_help_of_a_script_lists_the_flags_of_devices():
    script = [sys.executable, "-c", SCRIPT, "--help"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--simulate_devices: Make" in done.stdout
    assert "--device" not in run_command("checkpoints", "--help").stdout


@pytest.mark.slow
def test_a_dry_run_prints_the_memory_budget_and_writes_nothing(tmp_path):
    """And a misspelled variable is warned of, on the CPU too."""
    flags = ("--dry_run", "--simulate_devices=2")
    done = train(tmp_path / "run", *flags, XLA_PYTHON_CLIENT_MEM_FRACTON="0.5")
    assert done.returncode == 0, done.stderr
    assert "Memory on each device" in done.stdout and "332.04 KiB" in done.stdout
    assert "XLA_PYTHON_CLIENT_MEM_FRACTON" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_second_run_in_a_workdir_is_refused_and_evaluation_disturbs_nobody(tmp_path):
    workdir = tmp_path / "run"
    flags = (f"--workdir={workdir}", *LONG, "--config.num_steps=100000")
    process = subprocess.Popen(
        command("train", "--config=configs/digits.py", *flags),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_step(workdir, 200)
        done = train(workdir, *LONG, "--config.num_steps=100000")
        assert_refused(done, 64, "another run is writing to")
        done = run_command("evaluate", f"--workdir={workdir}")
        assert done.returncode == 0, done.stderr
        assert process.poll() is None
    finally:  # A failure leaves no process behind.
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors


LONG = (
    "--config.num_steps=1000",
    "--config.log_every=10",
    "--config.eval_every=100",
    "--config.save_every=50",
)


CODES = {signal.SIGKILL: -9, signal.SIGTERM: 75, signal.SIGINT: 130}


@pytest.mark.slow
@pytest.mark.parametrize("signals", [["SIGKILL"], ["SIGTERM", "SIGINT"]], ids=" ".join)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path, uninterrupted, signals
):
    workdir = tmp_path / "run"
    flags = ("--config=configs/digits.py", f"--workdir={workdir}", *LONG)
    saved = 0
    for number in (signal.Signals[name] for name in signals):
        process = subprocess.Popen(
            command("train", *flags),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_step(workdir, saved + 230)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == CODES[number], errors
        if number != signal.SIGKILL:
            assert f"{number.name} received" in errors and "is saved" in errors
            assert "Traceback" not in errors
        names = [path.name for path in (workdir / "checkpoints").iterdir()]
        before, saved = saved, max(int(name) for name in names if name.isdigit())
        assert before < saved < 1000
    done = train(workdir, *LONG)
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stdout
    assert (digest(workdir), numbers(workdir)) == uninterrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What a run leaves that nothing stopped."""
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = train(workdir, *LONG)
    assert done.returncode == 0, done.stderr
    return digest(workdir), numbers(workdir)


def wait_for_step(workdir, step):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = workdir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[-1].endswith("}") and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--config.num_stepz=3"], 64, ["num_stepz", "did you mean num_steps?"]),
        (["--config.foo=3"], 64, ["unknown key foo"]),
        (["--config.nowhere.x=3"], 64, ["has no key 'nowhere'"]),
        (["--config.steps-per-call=3"], 64, ["has no key 'steps-per-call'"]),
        (["--config.data.8=3"], 64, ["has no key 'data.8'"]),
        (["--config.num_steps.x=3"], 64, ["has no key 'num_steps.x'"]),
        (["--config.num_steps=abc"], 64, ["num_steps=abc", "wrong type", "number"]),
        (["--config.num_steps=1.5"], 64, ["config.num_steps=1.5", "a whole number"]),
        (["--config.ema_decay=x"], 64, ["config.ema_decay=x", ": a number is needed"]),
        (["--num_steps=3"], 64, ["'num_steps' (did you mean --config.num_steps?)"]),
        (["--config.optimizer.nesterov=maybe"], 64, ["true or false"]),
        (["--config.num_steps=None"], 64, ["num_steps=None", "a whole number"]),
        (["--config.num_steps=None", "--config.num_steps=0"], 64, ["num_steps=0;"]),
        (["--workdir="], 64, ["--workdir is needed"]),
        (["--config.num_steps=0"], 64, ["num_steps=0", "1 or more"]),
        (["--config.optimizer.clip_norm=-1"], 64, ["clip_norm=-1.0", "more than 0"]),
        (["--config.best_mode=most"], 64, ["best_mode=most", "min or max"]),
        (["--config=configs/digit.py"], 64, ["configs/digit.py does not exist"]),
        (["--devise=gpu"], 64, ["'devise'", "device"]),
        (["--num_devices=x"], 64, ["--num_devices=x", "number"]),
        (["extra"], 64, ["unexpected argument 'extra'"]),
        (["--device=gpu"], 69, ["--device=gpu cannot be used: [A20]", "fix:"]),
        (["--device=gqu", "--fallback=cpu"], 69, ["--device=gqu is not understood"]),
        (["--config.batch_size=100000000000000000000"], 64, ["=1000", "2**31 - 1"]),
        (["--config.num_steps=100000000000000000000"], 64, ["=1000", "2**31 - 1"]),
        (["--config.seed=99999999999999999999"], 64, ["seed=9999", "2**32"]),
        (["--device=cuda"], 69, ["auto, cpu, gpu, tpu"]),
        (["--device=cpu:3"], 69, ["cpu:3", "there are 1: cpu:0"]),
        (["--num_devices=2"], 69, ["--num_devices=2", "there are 1"]),
        (["--stall_seconds=0"], 64, ["--stall_seconds=0", "above 0, such as 1800"]),
        (["--join_seconds=inf"], 64, ["--join_seconds=inf", "such as 300"]),
        (["--join_seconds=0"], 64, ["--join_seconds=0", "above 0, such as 300"]),
        (["--stall_seconds=nan"], 64, ["--stall_seconds=nan", "above 0, such as"]),
        (["--local_device_ids=a,1"], 64, ["=a,1 is not understood", "such as 0,1"]),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, flags, code, words):
    workdir = tmp_path / "run"
    done = train(workdir, *flags, JAX_PLATFORMS="")
    assert_refused(done, code, *words)
    assert not workdir.exists()


# Each imports JAX; tests of the parts hear the same sentences without a process.
@pytest.mark.slow(but="flags0-")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--config.data.name=npz", "--config.data.path=x.npz"],
            ["the data file x.npz does not exist"],
        ),
        (["--config.model.name=mpl"], ["'mpl'", "did you mean mlp?", "resnet"]),
        (["--config.model.name=resnet"], ["resnet", "it takes channels, blocks"]),
        (["--config.model.name=nowhere:model"], ["nowhere:model", "imported"]),
        (["--config.data.name=npz"], ["needs a .npz file", "--config.data.path"]),
        (["--config.optimizer.schedule=step"], ["'step'", "cosine, linear"]),
        (["--config.optimizer.b2=0.9", "--config.optimizer.name=sgd"], ["no b2"]),
        (["--config.precision=fp16"], ["'fp16'", "bfloat16, float16"]),
        (
            ["--config.batch_size=130", "--simulate_devices=4"],
            ["130", "128 or 132"],
        ),
        (["--device_memory_limit=1MB"], ["=1MB is not an amount", "500MiB"]),
        (["--device_memory_limit=1MiB"], ["the run needs", "there are 1.00 MiB"]),
        (["--config.model.num_layers=-3"], ["num_layers=-3", "0 or more"]),
        (["--config.model.remat=('*/lin_9',)"], ["'*/lin_9' fits", "~/linear_0"]),
        (["--config.model.remat=(*/lin*)"], ["model.remat=(*/lin*) cannot be read"]),
        (["--config.model.name=:f"], ["':f' cannot be imported"]),
        (["--config.model.width=100000000000"], ["TiB", "mlp/~/linear_1"]),
        (["--config.batch_size=2000000000"], ["batch of 2,000,000,000", "bytes"]),
    ],
)
def test_a_mistake_that_the_parts_find_is_one_sentence(tmp_path, flags, words):
    workdir = tmp_path / "run"
    assert_refused(train(workdir, *flags, JAX_PLATFORMS=""), 64, *words)
    assert not workdir.exists()


def test_patterns_take_the_place_of_a_model_s_own_switch():
    """A config has `remat = False`, of another type, for the switch of GPT."""
    flags = "--dry_run", "--device=cpu", f"--config.data.path={ROOT / 'docs'}"
    flags += ("--config.model.remat=('*/block_9',)",)
    done = run_command("train", "--config=configs/gpt_bytes.py", *flags)
    assert_refused(done, 64, "'*/block_9' fits none", "gpt/block_0/mlp/up")


@pytest.mark.parametrize("missing", ["config", "workdir"])
def test_a_flag_that_is_needed_is_named(tmp_path, missing):
    flags = {"config": "configs/digits.py", "workdir": str(tmp_path / "run")}
    del flags[missing]
    done = run_command("train", *(f"--{name}={value}" for name, value in flags.items()))
    assert_refused(done, 64, f"--{missing} is needed")


@pytest.mark.slow
def test_a_fallback_is_loud_and_runs(tmp_path):
    done = train(tmp_path / "run", *SHORT, "--device=gpu", "--fallback=cpu")
    assert done.returncode == 0
    assert "RUNNING ON THE CPU" in done.stderr
    assert "1 x cpu: cpu:0. --fallback=cpu, because" in done.stdout


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("c.num_stepz = 3", ["unknown key num_stepz", "did you mean num_steps?"]),
        ("c.optimizer.learning_rate = '3e-4'", ["mine.py, line 4", "learning_rate"]),
        ("c.num_steps = 1e3", ["mine.py, line 4", "num_steps"]),
        ("1 / 0", ["mine.py, line 4", "division by zero"]),
        ("c.data = {'name': 'digits', 'colour': 1}", ["'colour'", "takes no keys"]),
        ("c.data = {}", ["no key data.name"]),
        ("import nowhere", ["mine.py, line 4", "nowhere"]),
    ],
)
def test_a_mistake_in_a_config_file_is_one_sentence(tmp_path, body, words):
    file = tmp_path / "mine.py"
    file.write_text(
        "from haiku_template.config import default_config\n"
        f"def get_config():\n    c = default_config()\n    {body}\n    return c\n"
    )
    done = train(tmp_path / "run", config=file)
    assert_refused(done, 64, *words)


CONFIG_WITH_A_MODEL = """
import haiku as hk
from haiku_template.config import default_config


def model(num_outputs, axis_name, width):
    def forward(inputs, is_training):
        x = hk.Linear(width)(hk.Flatten()(inputs))
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis_name)
        return hk.Linear(num_outputs)(norm(x, is_training) ** 2)

    return hk.transform_with_state(forward)


def get_config():
    config = default_config()
    config.num_steps = 60
    config.optimizer.learning_rate = 1e-2
    config.model = {"name": "mine:model", "width": 32}
    return config
"""


@pytest.mark.slow
def test_a_model_of_yours_in_a_config_file_trains_and_is_evaluated(tmp_path):
    (tmp_path / "mine.py").write_text(CONFIG_WITH_A_MODEL)
    workdir = tmp_path / "run"
    done = train(workdir, "--simulate_devices=2", config="mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    drawn = {"PYTHONPATH": str(ROOT)}  # With the real matplotlib.
    done = run_command("evaluate", f"--workdir={workdir}", cwd=tmp_path, **drawn)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    assert metrics["eval/accuracy"] > 0.8 and metrics["eval/macro_f1"] > 0.8
    assert (workdir / "confusion.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_script_of_at_most_thirty_lines_trains_a_model_of_yours(tmp_path):
    page = (ROOT / "docs" / "running.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    script = next(block for block in blocks if "Experiment(" in block)
    assert len(script.strip().splitlines()) <= 30
    (tmp_path / "mine.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "mine.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": UNDRAWN, "JAX_NUM_CPU_DEVICES": "4"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "4 x cpu" in done.stdout and "eval loss" in done.stdout


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


@pytest.fixture
def mnist(tmp_path):
    """Files in MNIST's format: each class a bright row of its own."""
    rng = np.random.default_rng(0)
    directory = tmp_path / "mnist"
    directory.mkdir()
    for name, size in (("train", 400), ("t10k", 90)):
        labels = rng.integers(0, 10, size)
        images = rng.integers(0, 40, (size, 28, 28))
        images[np.arange(size), 2 * labels] = 250
        write_idx(directory / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(directory / f"{name}-labels-idx1-ubyte.gz", labels)
    return directory


IMAGES = ("--config.num_steps=60", "--config.optimizer.warmup_steps=10")


@pytest.mark.slow
def test_mnist_files_train(tmp_path, mnist):
    path = f"--config.data.path={mnist}"
    done = train(tmp_path / "run", path, *IMAGES, config="configs/mnist.py")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "run")[-1]["eval/accuracy"] > 0.9


@pytest.mark.slow
def test_data_that_is_missing_or_damaged_is_named(tmp_path, mnist):
    path = f"--config.data.path={mnist}"
    workdir = tmp_path / "run"

    def refused(*words):
        done = train(workdir, path, config="configs/mnist.py")
        assert_refused(done, 64, *words)
        assert not workdir.exists()

    images = mnist / "train-images-idx3-ubyte.gz"
    labels = mnist / "train-labels-idx1-ubyte.gz"
    kept = images.read_bytes(), labels.read_bytes()
    images.write_bytes(kept[0][:1000])
    refused(str(images), "damaged")
    images.unlink()
    refused(str(images), "does not exist", "t10k-images-idx3-ubyte.gz")
    images.write_bytes(kept[0])
    write_idx(labels, np.full(400, 11))
    refused("400 labels outside the 10 classes", "the first is 11, of example 0")
    write_idx(images, np.zeros((0, 28, 28)))
    write_idx(labels, np.zeros(0))
    refused("has no examples", "one at least is needed")


@pytest.mark.long
def test_cifar10_files_train(tmp_path):
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 255, (20, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    done = train(
        tmp_path / "run",
        f"--config.data.path={tmp_path}",
        "--config.num_steps=2",
        "--config.batch_size=8",
        "--config.optimizer.warmup_steps=1",
        "--config.model.blocks=1",
        "--simulate_devices=2",
        config="configs/cifar10_resnet.py",
    )
    assert done.returncode == 0, done.stderr


def test_evaluate_says_what_is_not_there(finished, tmp_path):
    workdir, _ = finished
    done = run_command("evaluate", f"--workdir={tmp_path}")
    assert_refused(done, 64, "is not the workdir of a run")
    done = run_command("evaluate", f"--workdir={workdir}", "--checkpoint=7")
    assert_refused(done, 64, "--checkpoint=7", "there are steps [40]")


def test_a_damaged_checkpoint_is_one_sentence_and_python_is_not_read(
    finished, tmp_path
):
    workdir, _ = finished
    subprocess.run(["cp", "-r", workdir, tmp_path / "run"], check=True)
    (tmp_path / "run/config.py").write_text("raise SystemExit('executed')")
    for file in (tmp_path / "run/checkpoints/40/state/d").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    done = run_command("evaluate", f"--workdir={tmp_path / 'run'}")
    assert_refused(done, 74, "checkpoint of step 40", "damaged")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_exits_70(tmp_path):
    flags = ("--config.optimizer.learning_rate=1e30", "--config.optimizer.name=sgd")
    done = train(tmp_path / "run", *SHORT, *flags, "--config.log_every=5")
    assert_refused(done, 70, "the loss of step", "infinite or NaN")


def test_help_answers_without_starting_jax():
    begun = subprocess.run(
        [sys.executable, "-X", "importtime", *command("train", "--help")[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert "--simulate_devices" in begun.stdout and "Exit codes" in begun.stdout
    assert "jax" not in re.sub("no jax|jax_doctor", "", begun.stderr)


def test_the_package_lists_its_commands_without_importing_jax():
    begun = run_command("__main__", PYTHONPROFILEIMPORTTIME="1")
    assert re.findall(r"(?m)^python -m haiku_template\.(\w+) +[A-Z]", begun.stdout) == [
        *(
            "checkpoints",
            "compat",
            "convert",
            "doctor",
            "evaluate",
            "export",
            "generate",
            "new",
            "predict",
            "prepare",
        ),
        *("runs", "sweep", "train", "verify"),
    ]
    assert "jax" not in begun.stderr


WITH_FLAGS = """
import haiku as hk
import jax
from absl import flags

for name in {NAMES}:
    flags.DEFINE_integer(name, 32, "Of code that others published.")


def net(num_outputs, axis_name=None, **keys):
    def forward(inputs, is_training):
        assert flags.FLAGS.checkpoint == flags.FLAGS.mode == 32
        return hk.Linear(num_outputs)(hk.Flatten()(inputs))

    return hk.transform_with_state(forward)
"""


def test_a_model_whose_module_defines_flags_of_the_commands_names(tmp_path):
    """Published code often has its model and its flags in one file."""
    package = (ROOT / "haiku_template").rglob("*.py")
    define = re.compile(r'flags\.DEFINE_\w+\(\s*"(\w+)"')
    names = sorted({x for file in package for x in define.findall(file.read_text())})
    assert {"workdir", "batch_size", "mode", "device"} < {*names} and len(names) > 35
    text = WITH_FLAGS.replace("{NAMES}", repr([*names]))
    (tmp_path / "published.py").write_text(text)
    path = os.pathsep.join([UNDRAWN, str(ROOT)])
    run = functools.partial(run_command, cwd=tmp_path, PYTHONPATH=path)
    flags = "--config=configs/digits.py", "--config.model.name=published:net"
    flags += "--config.num_steps=3", "--device=cpu", "--workdir=run"
    assert (done := run("train", *flags)).returncode == 0, done.stderr
    for name, *words in (
        ("evaluate",),
        ("predict", "--output=a.npz"),
        ("export", "--format=stablehlo", "--output=exported", "--batch_size=4"),
        ("export", "--format=npz", "--output=a/b.npz"),
    ):
        done = run(name, "--workdir=run", *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.npz").exists() and (tmp_path / "a/b.npz").exists()
    signature = json.loads((tmp_path / "exported/forward.json").read_text())
    assert signature["inputs"][""]["shape"] == [4, 8, 8, 1]
    text = "import published\nfrom configs.digits import get_config"
    (tmp_path / "early.py").write_text(text)
    done = run("train", "--config=early.py", "--workdir=b")
    assert_refused(done, 64, "' is defined twice", "config.model.name=")


def test_flags_of_a_script_may_be_set_and_appended():
    code = """
from absl import flags
from haiku_template import cli
other = flags.FlagValues()
flags.DEFINE_integer("mine", 1, "Of a script.", flag_values=other)
flags.FLAGS.append_flag_values(other)
def main():
    cli.FLAGS.simulate_devices = 2
    assert {"mine", "device"} < {*cli.FLAGS} and len(cli.FLAGS) > 20
    print(flags.FLAGS.mine, flags.FLAGS.simulate_devices)
    print(cli.device_manager().describe())
cli.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("1 2\n2 x cpu"), done.stdout + done.stderr

"""Runs compared, and a config trained for each combination of values."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from ml_collections import config_dict
from rich.console import Console

from configs import digits
from haiku_template import combinations as sweep
from haiku_template import config as configs
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.reporting.display import table
from haiku_template.runs import comparison, start
from haiku_template.storage import read
from haiku_template.storage import workdir as workdirs
from tests.runs import ROOT, run_command

RATES = "optimizer.learning_rate=1e-4,1e-3,1e30"
SHORT = ["--config.num_steps=60", "--config.eval_every=20", "--config.save_every=20"]
SHORT += ["--config.optimizer.warmup_steps=0"]


def sweep_in(folder, *words):
    flags = ["--config=configs/digits.py", f"--workdir={folder}", "--device=cpu"]
    return run_command("sweep", *flags, *SHORT, *words, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "runs"
    return folder, sweep_in(folder, RATES, "seed=0")


def test_a_sweep_trains_each_combination_in_one_process(swept):
    folder, done = swept
    names = [f"learning_rate={x},seed=0" for x in ("1e-4", "1e-3", "1e30")]
    assert sorted(x.name for x in folder.iterdir() if x.is_dir()) == sorted(names)
    for name in names:
        saved = json.loads((folder / name / "config.json").read_text())
        assert saved["optimizer"]["learning_rate"] == float(name.split("=")[1][:4])
    # One run is not finite, which is said and ends no other.
    assert done.returncode == 70 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "error: 1 of 3 runs ended early, each with its line above: "
        "learning_rate=1e30,seed=0"
    )
    assert done.stdout.count("Parameters") == 3
    assert "┃ learning_rate ┃" in done.stdout and "not saved" in done.stdout
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_values_of_a_sweep_are_those_of_flags(tmp_path):
    """A word such as `false` was text, which is true."""
    config = digits.get_config()
    word = "model.deep=true,false,True,None,1,1e-3,x,False"
    members = sweep.combinations(config, tmp_path, [word])
    values = [member.config.model.deep for member in members]
    assert values == [True, False, True, None, 1, 1e-3, "x", False]
    assert [type(x) for x in values[:3]] == [bool] * 3
    with pytest.raises(ConfigError, match="'--config.seed=1' is not understood.*flags"):
        sweep.combinations(config, tmp_path, ["--config.seed=1"])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_value_that_is_refused_ends_no_other_run(tmp_path, parallel):
    words = [f"--parallel={parallel}", "precision=float32,bfloat15,bfloat16"]
    done = sweep_in(tmp_path / "runs", *words)
    assert done.returncode == 64 and "Traceback" not in done.stderr
    assert "bfloat15'; possible are" in done.stderr + done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("ended early, each with its line above: precision=bfloat15")
    assert done.stdout.count("│ done ") == 2
    done = sweep_in(tmp_path / "runs", "--config.batch_size=64", *words)
    ends = re.findall(r"error: (precision=\w+): ", done.stderr)
    if parallel == 1:  # Of others' workdirs, too.
        assert ends == ["precision=float32", "precision=bfloat15", "precision=bfloat16"]
    assert "3 of 3 runs ended early" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_sweep_of_which_nothing_begins_says_so(tmp_path):
    done = sweep_in(tmp_path / "runs", "precision=bfloat15,bfloat14")
    assert done.returncode == 64
    assert "error: 2 of 2 runs ended early" in done.stderr


MEMBERS = """
import sys
from pathlib import Path
from jax.errors import JaxRuntimeError
from configs import digits
from haiku_template import cli, errors, sweep
from haiku_template.runs import start

def run(config, devices, workdir):
    print("began", config.seed)
    if config.seed == 1:
        kind = getattr(errors, sys.argv[1], JaxRuntimeError)
        raise kind("RESOURCE_EXHAUSTED: one's own")

cli.device_manager = lambda: None
cli.FLAGS(["sweep"])
start.run = run
members = sweep.combinations(digits.get_config(), Path("absent"), ["seed=1,2"])
print(sweep._train_here(members))
"""
ENDS = [("ConfigError", 64), ("NonFiniteError", 70), ("MemoryFullError", 77)]
ENDS += [
    ("PlacementError", 64),
    ("StorageError", 74),
    ("DamagedError", 74),
    ("DataError", 71),
    ("Xla", 77),  # As where the trainer is built.
]


@pytest.mark.slow(but="-77")
@pytest.mark.parametrize(("error", "code"), ENDS)
def test_a_run_that_ends_early_ends_no_other(error, code):
    """Of several sizes of batches the largest does not fit: others were not begun."""
    command = [sys.executable, "-c", MEMBERS, error]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "began 1" in done.stdout and "began 2" in done.stdout, done.stderr
    assert done.stdout.strip().endswith(f"{{'seed=1': {code}, 'seed=2': 0}}")
    assert re.search("^error: seed=1: .*one's own$", done.stderr, re.MULTILINE)


THREADS = """
import os, sys
from pathlib import Path
from configs import digits
from haiku_template import cli, sweep

def stop():
    print(os.environ.get("PJRT_NPROC"))
    sys.exit()

cli.device_manager = stop
words = [f"exact_elastic={sys.argv[1]}"]
members = sweep.combinations(digits.get_config(), Path("absent"), words)
sweep._train_here(members)
"""


@pytest.mark.parametrize(("shares", "threads"), [("8", "8"), ("4,8", None)])
def test_a_sweep_of_logical_shares_has_the_threads_of_a_run(shares, threads):
    """Before JAX starts; of several numbers of shares in one process there are none."""
    env = {key: os.environ[key] for key in os.environ if key != "PJRT_NPROC"}
    command = [sys.executable, "-c", THREADS, shares]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.stdout.split() == [str(threads)], done.stderr


@pytest.mark.slow
def test_the_same_sweep_again_passes_by_what_is_done(swept):
    folder, _ = swept
    before = workdirs.read_json(folder / "learning_rate=1e-3,seed=0" / "run.json")
    done = sweep_in(folder, "optimizer.learning_rate=1e-4,1e-3", "seed=0")
    assert done.returncode == 0, done.stderr
    assert "1/2 learning_rate=1e-4,seed=0, done" in done.stdout
    assert "Parameters" not in done.stdout
    after = workdirs.read_json(folder / "learning_rate=1e-3,seed=0" / "run.json")
    assert before == after


def test_runs_are_compared_by_the_keys_that_differ(swept):
    folder, _ = swept
    done = run_command("runs", str(folder), "--csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert list(rows[0]) == [
        "run",
        "optimizer.learning_rate",
        "eval/accuracy",
        "at step",
        "state",
    ]
    assert [row["optimizer.learning_rate"] for row in rows] == [
        "0.001",
        "0.0001",
        "1e+30",
    ]
    assert [row["state"] for row in rows] == ["done", "done", "not saved"]
    file = folder / rows[0]["run"] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    best = max(x["eval/accuracy"] for x in lines if "eval/accuracy" in x)
    assert float(rows[0]["eval/accuracy"]) == pytest.approx(best, abs=1e-6)
    lowest = comparison.summarize_runs(folder, "train/loss", "min")
    losses = [run.best[0] for run in lowest if run.best]
    assert losses == sorted(losses)


def test_a_folder_without_runs_and_a_metric_without_a_mode_are_refused(tmp_path):
    for flags, words in (
        ([str(tmp_path)], "holds no runs"),
        ([], "name one folder of runs"),
        ([str(tmp_path), "--metric=eval/loss"], "needs --mode=min or --mode=max"),
    ):
        done = run_command("runs", *flags)
        assert done.returncode == 64 and words in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def run_with(tmp_path):
    """A workdir with these metrics, a checkpoint of this step, and keys."""

    def write(step, values, **keys):
        config = digits.get_config()
        config.update_from_flattened_dict({"num_steps": 30} | keys)
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / workdirs.COMMIT).touch()
        workdirs.write_json(folder / "run.json", {"id": "a"})
        workdirs.write_json(folder / "config.json", config.to_dict())
        rows = [{"step": 10 * n, "eval/accuracy": x} for n, x in enumerate(values, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return folder

    return write


def test_the_state_of_a_run_is_said(run_with):
    early = {"early_stop.metric": "eval/accuracy", "early_stop.mode": "max"}
    early["early_stop.patience"] = 1
    folders = {
        "done": run_with(30, [0.1, 0.2, 0.3]),
        "stopped at 20": run_with(20, [0.1, 0.2]),
        "stopped early": run_with(20, [0.2, 0.1], **early),
    }
    for state, folder in folders.items():
        assert comparison.summarize_run(folder).state == state
    with workdirs.locked(folders["done"]):
        assert comparison.summarize_run(folders["done"]).state == "running"


def test_of_equal_values_the_first_is_the_best(run_with):
    assert comparison.summarize_run(run_with(30, [0.2, 0.3, 0.3])).best == (0.3, 20)


def test_a_table_of_more_keys_than_a_terminal_has_room_for_names_its_runs(
    run_with, tmp_path, capsys, monkeypatch
):
    """At 100 columns, 16 keys that differed left no letter of the runs' names."""
    keys = {
        key: value
        for key, value in configs.flatten(digits.get_config().to_dict()).items()
        if type(value) in (int, float)
    }
    assert len(keys) > 12
    for n in (1, 2):
        changes = {key: type(x)(x + n) for key, x in keys.items()}
        run_with(30, [0.2, 0.3], **{"model.name": "x " * 60 + str(n)}, **changes)
    runs = comparison.summarize_runs(tmp_path)
    shown = {}
    for width in (80, 2_000):
        monkeypatch.setenv("COLUMNS", str(width))
        comparison.show(tmp_path, runs)
        shown[width] = capsys.readouterr().out
        assert " run1 " in shown[width] and "eval/accuracy" in shown[width]
        assert " 20      │ stopped at 30 │" in shown[width] and "…" not in shown[width]
    differ = comparison.differing(runs)
    line = next(x for x in shown[80].splitlines() if "no room in 80 columns" in x)
    hidden = line.partition(" differ, too")[0].split(", ")
    assert "model.name" in hidden and {*hidden} < {*differ}
    header = shown[80].splitlines()[2]
    names = [x.rpartition(".")[2] for x in differ if x not in hidden]
    assert len(names) >= 2 and all(f" {x} " in header for x in names)
    assert "no room" not in shown[2_000]


def summary(seed, rate, best, state="done", metric="eval/loss"):
    keys = {"seed": seed, "optimizer.learning_rate": rate}
    keys = {} if seed is None else keys
    return comparison.Summary("", keys, [], metric, best and (best, 10), state)


@pytest.mark.parametrize("sign", [1, -1], ids=["min", "max"])
def test_runs_of_several_seeds_have_a_mean_and_a_deviation(sign):
    """Of the mean, and not of the best seed, is the order."""
    runs = [
        summary(0, 0.3, sign * 0.5),  # Alone.
        summary(0, 0.1, sign * 1.0),
        summary(0, 0.2, sign * 2.0),
        summary(1, 0.2, sign * 3.0),
        summary(2, 0.2, sign * 4.0),
        summary(2, 0.1, sign * 6.0, "running"),
        summary(1, 0.1, sign * 7.0, "stopped early"),
        summary(1, 0.1, sign * 7.0),  # A copy.
        summary(None, None, sign * 8.0),  # Of scripts.
        summary(None, None, sign * 9.0),
        summary(3, 0.2, None),
    ]
    columns = comparison.over_seeds(runs).columns
    assert {column.header: [*column.cells] for column in columns} == {
        "learning_rate": ["0.2", "0.1"],
        "best of": ["eval/loss"] * 2,
        "mean": [f"{sign * 3}", f"{sign * 4}"],
        "±": ["1", "4.2"],
        "seeds": ["3", "2"],
    }
    assert comparison.over_seeds(runs[:3]) is None


def test_seeds_of_an_edited_config_are_told_apart_all_the_same():
    """Whatever a config.json has there, the runs are tabulated."""
    runs = [summary([0], 0.1, 1.0), summary({"a": 1}, 0.1, 3.0)]
    *_, mean, _, seeds = comparison.over_seeds(runs).columns
    assert [*mean.cells, *seeds.cells] == ["2", "2"]


@pytest.mark.parametrize("width", [1, 20, 38])
def test_a_narrow_terminal_gets_lines_with_the_runs_names(
    run_with, tmp_path, capsys, monkeypatch, width
):
    """At 39 columns the names were without a letter."""
    run_with(30, [0.2, 0.3])
    runs = comparison.summarize_runs(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    Console().print(table("", "abc", [("name", "", "last")]))  # An empty cell is told.
    lines = "".join(capsys.readouterr().out.split())
    assert "name-last" in lines or width > 16
    comparison.show(tmp_path, runs)
    row = f"{runs[0].name}0.320{runs[0].state}"
    assert row in "".join(capsys.readouterr().out.split())


REFUSED = {
    "no words": ([], "needs keys with values"),
    "no values": (["seed"], "'seed' is not understood"),
    "no such key": (["optimiser.learning_rate=1"], "optimiser"),
    "misspelled": (["optimizer.learning_rat=1,2"], "did you mean learning_rate"),
    "type": (["seed=0,x"], "seed"),
    "range": (["seed=0,-1"], "config.seed=-1; possible is 0 to"),
    "twice": (["seed=0,0"], "two runs of the sweep have the same name, seed=0"),
    "two words": (["seed=0,1", "config.seed=2"], "seed is given twice; .* in one word"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sweep_that_cannot_be_is_refused_before_any_run(tmp_path, name):
    words, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence):
        sweep.combinations(digits.get_config(), tmp_path, words)


def test_combinations_are_all_of_them_the_last_key_fastest(tmp_path):
    words = ["model.width=8,16", "data.path=a/b,c", "optimizer.clip_norm=None,1"]
    base = digits.get_config()
    members = sweep.combinations(base, tmp_path, words)
    assert len(members) == 8
    assert members[0].workdir == tmp_path / "width=8,path=a_b,clip_norm=None"
    assert isinstance(members[0].config, config_dict.ConfigDict)
    values = [(x.config.model.width, x.config.optimizer.clip_norm) for x in members]
    assert values[:3] == [(8, None), (8, 1.0), (8, None)] and values[-1] == (16, 1.0)
    assert members[0].config.data.path == "a/b"
    assert base.model.get("width") != 8


def test_a_process_of_one_run_makes_the_config_of_no_other(tmp_path, monkeypatch):
    checks, real = [], sweep.config.check
    monkeypatch.setattr(sweep.config, "check", lambda x: checks.append(x) or real(x))
    words = ["seed=" + ",".join(map(str, range(50))), "model.width=8,16"]
    name = "seed=7,width=16"
    (member,) = sweep.combinations(digits.get_config(), tmp_path, words, name)
    assert member.workdir == tmp_path / name and len(checks) == 1
    assert (member.config.seed, member.config.model.width) == (7, 16)
    with pytest.raises(ConfigError, match="--only=seed=7; possible are seed=0,width=8"):
        sweep.combinations(digits.get_config(), tmp_path, words, "seed=7")


def test_processes_share_the_devices_that_are_listed(monkeypatch):
    assert sweep.shares("cpu", 3) == ["", "", ""]
    assert sweep.shares("gpu:0,1,2,5", 2) == ["gpu:0,2", "gpu:1,5"]
    for device in ("gpu", "gpu:0", "tpu"):
        with pytest.raises(ConfigError, match="needs a device for each process"):
            sweep.shares(device, 2)
    for device in ("gpu:0,0", "gpu:0,00", "gpu:1,2,1"):
        with pytest.raises(ConfigError, match="names a device twice"):
            sweep.shares(device, 2)


@pytest.mark.slow
def test_processes_train_beside_each_other_and_a_later_sweep_finds_them(tmp_path):
    words = ("seed=0,1", "model.width=8,-8")
    done = sweep_in(tmp_path / "a", "seed=0,1,2", "--parallel=2")
    assert done.returncode == 0, done.stderr
    for seed in range(3):
        assert f"seed={seed}: done" in done.stdout
    again = sweep_in(tmp_path / "a", "seed=0,1,2")
    assert again.stdout.count(", done") == 3
    # Bitwise as one after another.
    alone = sweep_in(tmp_path / "b", "seed=2")
    assert alone.returncode == 0
    a, b = (
        [
            {k: v for k, v in json.loads(line).items() if not k.startswith("perf/")}
            for line in (tmp_path / x / "seed=2" / "metrics.jsonl")
            .read_text()
            .splitlines()
        ]
        for x in "ab"
    )
    assert a == b
    failed = sweep_in(tmp_path / "c", *words, "--parallel=2")
    assert failed.returncode != 0 and "Traceback" not in failed.stderr


KILLED = """
import subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from haiku_template import sweep

class Member:
    workdir = Path("seed=0")

code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
sweep._start = lambda *_: subprocess.Popen([sys.executable, "-c", code])
sweep.FLAGS = SimpleNamespace(device="gpu", simulate_devices=2, parallel=2)
print(sweep._train_in_processes([Member]))
"""


def test_a_process_of_a_sweep_that_is_killed_is_said_as_a_shell_does():
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "seed=0: killed\n{'seed=0': 137}" in done.stdout, done.stderr


IN_PROCESSES = """
import os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from haiku_template import sweep

case, files, counts, processes = sys.argv[1], [], [], []
seconds = 9 if case == "error" else 0

def start(name, place, errors):
    files.append(errors)
    counts.append(sum(not file.closed for file in files))
    if case == "error" and len(files) == 2:
        raise OSError("too many open files")
    code = f"import time; time.sleep({seconds})"
    processes.append(subprocess.Popen([sys.executable, "-S", "-c", code]))
    return processes[-1]

sweep._start, sweep.POLL_SECONDS = start, 0.01
sweep.FLAGS = SimpleNamespace(device="cpu", simulate_devices=None, parallel=2)
if case == "reader":
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
try:
    members = [SimpleNamespace(workdir=Path(str(i))) for i in range(5)]
    codes = [*sweep._train_in_processes(members).values()]
except OSError as error:
    codes = str(error)
ends = [process.poll() for process in processes]
print(codes, max(counts), ends, file=sys.stderr)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("error", "too many open files 2 [-15]"),
        ("reader", "[0, 0, 0, 0, 0] 2 [0, 0, 0, 0, 0]"),
    ],
)
def test_a_sweep_ends_its_processes_and_closes_their_files(case, words):
    """By an error, and where nobody reads what it prints."""
    command = [sys.executable, "-c", IN_PROCESSES, case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == words


ENDED = """
import subprocess, sys
from haiku_template import sweep

code = '''
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), print("saved"), sys.exit(75)))
print("ready", flush=True)
time.sleep(60)
'''
command = [sys.executable, "-c", code]
running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
for process in running:
    process.stdout.readline()
sweep._end(running)
print([(process.poll(), process.stdout.read()) for process in running])
"""


def test_a_sweep_that_ends_waits_for_what_its_processes_save():
    command = [sys.executable, "-c", ENDED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == str([(75, b"saved\n")] * 2), done.stderr


@pytest.mark.slow
def test_a_member_that_lost_its_checkpoints_comes_back_from_its_mirror(tmp_path):
    flag = f"--config.mirror={tmp_path / 'm'}"
    assert sweep_in(tmp_path / "s", "seed=0,1", flag).returncode == 0
    shutil.rmtree(tmp_path / "s/seed=0/checkpoints")
    done = sweep_in(tmp_path / "s", "seed=0,1", flag)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s/seed=0/checkpoints/60").is_dir()


@pytest.mark.slow
def test_a_sweep_that_is_terminated_has_saved_its_members_and_says_so(tmp_path):
    command = [sys.executable, "-m", "haiku_template.sweep", "--device=cpu"]
    command += ["--config=configs/digits.py", f"--workdir={tmp_path}", "--parallel=2"]
    command += ["--config.num_steps=1000000", "seed=0,1"]
    folders = [tmp_path / f"seed={seed}" for seed in (0, 1)]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as sweep_process:
        while not all(read(folder / workdirs.METRICS) for folder in folders):
            assert sweep_process.poll() is None, sweep_process.stderr.read()
            time.sleep(0.1)
        sweep_process.terminate()
        errors = sweep_process.stderr.read()
    assert sweep_process.returncode == 75
    assert "SIGTERM received: the runs end, and save" in errors
    assert all(workdirs.saved_steps(x / workdirs.CHECKPOINTS) for x in folders)


@pytest.mark.slow
def test_keys_may_be_behind_the_flags_end(tmp_path):
    done = sweep_in(tmp_path, "--parallel=2", "--", "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert {"seed=0", "seed=1"} < {x.name for x in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seed=0,1"], "flag 'seed' (did you mean --config.seed?); keys of a sweep"),
        (["--config.seed=0,1"], "a whole number is needed here; keys of a sweep are"),
        (["--", "--config=other.py"], "'--config=other.py' is not understood"),
        (["--", "--config.num_epochs=None"], "'--config.num_epochs=None' is not un"),
        (["--", "--help"], "'--help' is not understood"),
    ],
)
def test_words_that_look_like_flags_are_told_to_be_keys(tmp_path, words, sentence):
    done = sweep_in(tmp_path, *words)
    assert done.returncode == 64 and done.stderr.startswith("error: "), done.stderr
    assert sentence in done.stderr


@pytest.mark.parametrize("flag", ["--devcie=cpu", "--parallel=x"])
def test_other_mistakes_of_a_sweep_are_told_nothing_of_keys(tmp_path, flag):
    done = sweep_in(tmp_path, flag, "seed=0,1")
    assert done.returncode == 64 and "keys of a sweep" not in done.stderr, done.stderr


def test_keys_that_refer_to_a_swept_one_follow_it_as_they_follow_a_flag(tmp_path):
    config = digits.get_config()
    config.eval_every = config.get_ref("num_steps") // 4
    members = sweep.combinations(config, tmp_path, ["num_steps=40,80"])
    assert [member.config.eval_every for member in members] == [10, 20]
    assert config.eval_every == digits.get_config().num_steps // 4
    changed = start.with_changes(config, {"num_steps": 400})
    assert changed.eval_every == 100
    devices = DeviceManager.create("cpu", num_devices=1)
    config.num_epochs = 4.0
    epochs = start.in_steps(config, devices)
    assert epochs.eval_every == epochs.num_steps // 4 > 10


def test_a_value_that_no_config_holds_is_named_before_it_is_copied(tmp_path):
    config = digits.get_config()
    config.model.module = json
    with pytest.raises(ConfigError, match="config.model.module is a module, which"):
        sweep.combinations(config, tmp_path, ["seed=0,1"])

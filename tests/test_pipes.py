"""Commands whose output nobody reads any more, as in `command | head -1`: quiet."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.runs import ROOT
from tests.test_predict import X, Y, config_of, fit
from tests.test_signals import COMMANDS


def unread(module, *words, flag="-m"):
    """Runs a command that prints to a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, flag, module, *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""},
        timeout=200,
        check=False,
    )
    os.close(writer)
    return done


@pytest.mark.parametrize("name", ["train", "runs", "", "jax_doctor"])
def test_help_and_lists_end_quietly(name):
    module = "jax_doctor" if name == "jax_doctor" else f"haiku_template.{name}"
    done = unread(module.rstrip("."), *["--help"] * bool(name))
    assert done.stderr == ""


def printed(where, module, *words, flag="-m"):
    """Runs a command whose standard output is closed, or on a disk that is full."""
    command = [sys.executable, *[flag] * bool(flag), module, *words]
    shell = ["sh", "-c", f'exec "$@" {where}', "sh", *command]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        shell, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ, timeout=200
    )


ON_DISK = {
    "train": ["--help"],
    "runs": ["{}"],
    "checkpoints": ["--workdir={}"],
    "predict": ["--workdir={}", "--device=cpu"],
    "prepare": [
        "--input=haiku_text",
        "--tokenizer={}/t.json",
        "--output={}/t.safetensors",
    ],
}
ON_DISK["prepare"].append("--train_vocab_size=257")


@pytest.mark.parametrize("name", ON_DISK)
def test_a_full_disk_for_what_is_printed_is_one_sentence(workdir, name):
    words = [word.format(workdir) for word in ON_DISK[name]]
    done = printed(">/dev/full", f"haiku_template.{name}", *words)
    assert done.returncode == 74, done.stderr
    (line,) = [x for x in done.stderr.splitlines() if not x.startswith("W")]
    assert line == "error: standard output: No space left on device"


@pytest.mark.parametrize("name", ["train", "predict", "runs"])
def test_a_closed_output_is_none(workdir, tmp_path, name):
    words = [word.format(workdir) for word in ON_DISK[name]]
    if name == "train":
        words = ["--config=digits", "--config.num_steps=2", "--device=cpu"]
        words += [f"--workdir={tmp_path / 'run'}"]
    done = printed(">&-", f"haiku_template.{name}", *words)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


SAYING = r"""
import contextlib, os, time
from haiku_template import cli, signals

def main():
    for file in (1, 2):
        with contextlib.suppress(OSError):
            os.write(file, b"\n")  # Was heard as SIGUSR1, whose number it is.
    time.sleep(signals.PATIENCE + 1)

{}
"""


@pytest.mark.parametrize("run", ["cli.run(main)", "signals.watch(); main()"])
def test_what_libraries_say_on_a_closed_file_is_in_no_other(run):
    code = SAYING.format(f"signals.install(); {run}")
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, cwd=ROOT, timeout=200, check=False).returncode == 0


def test_the_doctor_takes_a_closed_output_and_a_full_disk():
    assert printed(">&-", "jax_doctor", "--device=cpu").returncode == 0
    done = printed(">/dev/full", "jax_doctor", "--device=cpu")
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"train"}))
def test_help_of_each_command_ends_quietly(name):
    assert unread(f"haiku_template.{name}", "--help").stderr == ""


FAILING = """
from haiku_template import cli, errors

def main():
    print("a line")
    raise errors.ConfigError("a sentence")

cli.run(main)
"""


def test_the_sentence_and_the_code_of_an_error_stay():
    done = unread(FAILING, flag="-c")
    assert (done.returncode, done.stderr) == (64, "error: a sentence\n")


FULL = ["2>/dev/full", ">/dev/full 2>&1"]


@pytest.mark.parametrize("where", FULL)
def test_an_error_that_a_full_disk_does_not_take_has_its_exit_code(where):
    code = FAILING.replace('print("a line")', "logging.warning(0)")
    done = printed(where, f"from absl import logging\n{code}", flag="-c")
    assert (done.returncode, done.stderr) == (64, "")


def test_no_letter_of_what_is_printed_ends_a_command(monkeypatch):
    """Such as of a workdir or a class, on a terminal that is not UTF-8."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = FAILING.replace("a line", "\\xe4 \\udce4")
    done = printed(">/dev/null", code, flag="-c")
    assert (done.returncode, done.stderr) == (64, "error: a sentence\n")


UNREAD = {
    "cli.run": ["-c", FAILING.replace('"a line"', 'end=""')],
    "new": ["-m", "haiku_template.new", "--notebooks=/dev/null/x"],
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_error_that_nobody_reads_has_its_exit_code(name):
    """Such as of `train 2>&1 | tee log` where tee is gone: 0 said that it was done."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *UNREAD[name]]
    done = subprocess.run(command, stdout=writer, stderr=writer, cwd=ROOT, timeout=200)
    os.close(writer)
    assert done.returncode == 64


def test_a_current_directory_that_is_gone_is_said(tmp_path):
    code = FAILING.replace('print("a line")', "os.rmdir(os.getcwd()); open('a')")
    done = subprocess.run(
        [sys.executable, "-c", f"import os\n{code}"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert done.returncode == 64 and "current directory was removed" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_docstrings_commands_have_a_help():
    for command in (["-m", "haiku_template.compat"], ["launch/local.py"]):
        command = [sys.executable, "-OO", *command, "--help"]
        assert b"None" not in subprocess.check_output(command, cwd=ROOT, timeout=200)


def test_a_launcher_goes_on_where_nobody_reads_what_it_says():
    """A restart was said to a full disk: the launcher ended in an OSError, with 1."""
    words = ["--processes=1", "--restarts=1", "--", "sh", "-c", "exit 76"]
    done = printed("2>/dev/full", "launch/local.py", *words, flag="")
    assert done.returncode == 76


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipes")
    np.savez(folder / "new.npz", x=X[:11], y=Y[:11])
    return fit(config_of(folder), folder / "runs" / "one")


PRINTING = {
    "evaluate": ["--workdir={run}"],
    "predict": ["--workdir={run}", "--inputs={run}/../../new.npz"],
    "checkpoints": ["--workdir={run}"],
    "export": ["--workdir={run}", "--format=safetensors", "--output={run}/../out"],
    "runs": ["{run}/.."],
    "doctor": ["--code=jax_doctor"],
    "new": ["--notebooks={run}/../../notebooks"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if x == "evaluate" else pytest.mark.slow)
        for x in PRINTING
    ],
)
def test_a_command_that_printed_to_nobody_is_done(workdir, name):
    words = [word.format(run=workdir) for word in PRINTING[name]]
    done = unread(f"haiku_template.{name}", *words)
    # rich, which prints the table of runs, has a code of its own for this.
    assert (done.returncode, done.stderr) == (int(name == "runs"), "")


@pytest.mark.slow
def test_a_training_goes_on(workdir, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from haiku_template.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.num_steps = 4\n"
        "    config.model = {'name': 'mlp', 'width': 8}\n"
        f"    path = {str(workdir.parents[1] / 'data.npz')!r}\n"
        "    config.data = {'name': 'npz', 'path': path}\n"
        "    return config\n"
    )
    words = [f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path / 'run'}"]
    done = unread("haiku_template.train", *words)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()

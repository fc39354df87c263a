"""`generate` as a user runs it: real processes, files and exit codes."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from words import TEXT

from tests.runs import run_command

ROOT = Path(__file__).parents[3]
WORDS = Path(__file__).with_name("words.py")
COMMAND = [sys.executable, "-m", "haiku_template.generate"]
ENVIRON = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}


run = functools.partial(run_command, "generate", PYTHONPATH=ENVIRON["PYTHONPATH"])


def without_import(stderr):
    """What is left of standard error beside the file that the run's data come from."""
    first, _, rest = stderr.partition("\n")
    assert first.endswith(f" names code, which is run: {WORDS}"), stderr
    return rest


def test_it_prints_the_prompt_and_what_follows(trained):
    _, workdir = trained
    flags = ("--prompt=my dog", "--num_tokens=60", "--temperature=0")
    done = run(f"--workdir={workdir}", *flags, "--simulate_devices=2")
    assert done.returncode == 0 and without_import(done.stderr) == ""
    # 66 bytes in all; the é takes two.
    assert done.stdout == TEXT.encode()[:66].decode() + "\n"


@pytest.mark.slow
def test_prompts_of_a_file_go_on_side_by_side(trained, tmp_path):
    _, workdir = trained
    path = tmp_path / "prompts.txt"
    path.write_text("my dog\na café\n")
    flags = ("--num_tokens=20", "--temperature=0", "--checkpoint=best")
    done = run(f"--workdir={workdir}", f"--prompt_file={path}", *flags)
    assert done.returncode == 0 and without_import(done.stderr) == ""
    first, second = done.stdout.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert first == TEXT.encode()[:26].decode()
    assert second == "a café by night. my dog ra"


# What runs in the background of a script ignores SIGINT, and so do its children.
HEARS_SIGINT = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("haiku_template.generate", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow(but="interrupt")
@pytest.mark.parametrize("ending", ["reader leaves", "interrupt"])
def test_it_stops_without_a_word_when_nobody_wants_more(trained, ending):
    _, workdir = trained
    flags = (f"--workdir={workdir}", "--prompt=my ", "--num_tokens=1000000")
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS_SIGINT, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRON,
    )
    assert len(process.stdout.read(20)) == 20  # It writes.
    if ending == "reader leaves":
        process.stdout.close()
    else:
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        process.stdout.close()
    assert without_import(process.stderr.read().decode()) == ""
    process.stderr.close()
    assert process.wait(timeout=100) == (130 if ending == "interrupt" else 0)


@pytest.mark.slow
def test_without_the_data_the_tokenizer_can_be_named(trained, tmp_path):
    config, workdir = trained
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    values = json.loads((copy / "config.json").read_text())
    for name, words in (
        ("words:mute", "words:mute of the run does not say what its tokens stand for"),
        ("npz", "the data set npz needs a .npz file"),
    ):
        values["data"] = {"name": name}
        (copy / "config.json").write_text(json.dumps(values))
        done = run(f"--workdir={copy}")
        assert_refused(done, words, "--tokenizer=bytes", imports=":" in name)
    done = run(f"--workdir={copy}", "--tokenizer=bytes", "--num_tokens=5")
    assert done.returncode == 0 and done.stderr == ""


def assert_refused(done, *words, imports=False):
    """One sentence, no traceback, the right exit code."""
    assert done.returncode == 64, done.stderr
    stderr = without_import(done.stderr) if imports else done.stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt=",), "--prompt is empty"),
        (("--prompt=a", "--prompt_file=b"), "give one of the two"),
        (("--prompt_file=missing.txt",), "--prompt_file=missing.txt cannot be read"),
        (("--tokenizer=",), "--tokenizer= is empty; give --tokenizer=bytes"),
        (("--num_tokens=0",), "--num_tokens=0; possible is 1 or more"),
    ],
)
def test_mistakes_are_one_sentence(trained, flags, words):
    _, workdir = trained
    assert_refused(run(f"--workdir={workdir}", *flags), words)


@pytest.mark.slow(but="checkpoint")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--checkpoint=7",), "--checkpoint=7 is not in"),
        (("--simulate_devices=2", "--num_devices=2"), "and 2 were asked for"),
    ],
)
def test_what_the_run_does_not_have_is_one_sentence(trained, flags, words):
    _, workdir = trained
    done = run(f"--workdir={workdir}", *flags)
    assert_refused(done, words, imports=True)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    assert_refused(run(f"--workdir={tmp_path}"), "is not the workdir of a run")
    assert_refused(run(), "--workdir is needed")

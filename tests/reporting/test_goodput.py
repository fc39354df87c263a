"""Row C47 of the reliability bench: what a run lost is what it says that it lost."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax._src import compiler

from haiku_template.devices import Ledger
from haiku_template.devices.transfer import COMPILED
from haiku_template.reporting.goodput import GOODPUT, Progress, described, goodput
from haiku_template.runs import train
from tests.runs import ROOT, UNDRAWN
from tests.training.test_skipping import trainer


def written(workdir, *starts):
    rows = [row for rows in starts for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (workdir / GOODPUT).write_text(text + '{"time": 9, "st')  # Killed as it wrote.


def row(time, step, **values):
    return {"time": time, "step": step} | values


def test_seconds_are_of_steps_that_count_and_by_cause_of_those_that_do_not(tmp_path):
    first = [
        row(110.0, 0, began=100.0),
        row(115.0, 10, data=1.0),
        row(118.0, 10, data=1.0, evaluation=3.0),
        # 2 s of saving after step 10, then ten steps in 10 s.
        row(130.0, 20, data=3.0, evaluation=3.0, saving=2.0),
    ]
    second = [
        row(208.0, 10, began=200.0),
        row(218.0, 20),
        row(219.0, 20, saving=1.0),
        row(229.0, 30, saving=1.0),
        row(229.5, 30, saving=1.5, code=75),
    ]
    third = [row(305.0, 25, began=300.0), row(310.0, 30), row(312.0, 30, code=0)]
    written(tmp_path, first, second, third)
    seconds = goodput(tmp_path)
    assert seconds == pytest.approx(
        {
            "starting": 10.0 + 8.0 + 5.0,
            "steps": 4.0 + 10.0 + 5.0 + 5.0,
            "data": 1.0,
            "evaluation": 3.0,
            "saving": 2.0 + 1.0,
            "other": 2.0,
            "lost killed": 10.0,
            "lost 75": 5.0 + 0.5,
        }
    )
    line = described(seconds)
    assert line.startswith("goodput   34 % of 71.5 s in all starts: steps 24.0 s, ")
    assert "lost killed 10.0 s" in line and "lost 75 5.5 s" in line


@pytest.mark.parametrize("text", ["", "[]\n", "{}\n", '{"time": 1}\n', "x\n"])
def test_a_damaged_file_ends_nothing(tmp_path, text):
    (tmp_path / GOODPUT).write_text(text)
    assert goodput(tmp_path) == goodput(str(tmp_path)) == {}
    assert described({}).startswith("goodput   0 %")


def test_a_run_says_what_it_spent_its_time_on(tmp_path, capsys):
    def hook(event):
        if event == ("step", 7, event.state, event.values) and fails:
            raise ValueError

    run = {"num_steps": 12, "save_every": 5, "log_every": 1, "workdir": tmp_path}
    fails = [True]
    with pytest.raises(ValueError):
        train(trainer({}), hooks=[hook], **run)
    assert "goodput" not in capsys.readouterr().out
    fails.clear()
    train(trainer({}), hooks=[hook], **run)
    shown = capsys.readouterr().out
    seconds = goodput(tmp_path)
    assert shown.count("goodput   ") == 1
    assert {"starting", "steps", "data", "saving"} <= seconds.keys()
    lines = (tmp_path / GOODPUT).read_text().splitlines()
    codes = [json.loads(x).get("code") for x in lines]
    assert [code for code in codes if code is not None] == [1, 0]
    # The state was saved before the error, and no step was done again.
    assert seconds.get("lost 1", 0.0) < 0.2 * sum(seconds.values())


def test_compilation_is_a_cause_of_its_own(tmp_path, monkeypatch):
    """Each step's hook compiles a program, for 0.3 s longer; known within 5 %."""
    compile_program, slow = compiler.compile_or_get_cached, []

    def slowly(*args, **kwargs):
        begun = time.perf_counter()
        time.sleep(0.3)
        program = compile_program(*args, **kwargs)
        slow.append(time.perf_counter() - begun)
        return program

    def hook(event):
        if event.what == "step":
            monkeypatch.setattr(compiler, "compile_or_get_cached", slowly)
            shape = jax.ShapeDtypeStruct((3,), np.float32)
            jax.jit(lambda x: x + event.step).lower(shape).compile()
            monkeypatch.undo()

    begun = time.perf_counter()
    run = {"num_steps": 5, "save_every": 2, "log_every": 1, "workdir": tmp_path}
    train(trainer({}), hooks=[hook], **run)
    total = time.perf_counter() - begun
    rows = [json.loads(x) for x in (tmp_path / GOODPUT).read_text().splitlines()]
    # Of the first step there is more.
    compiled = rows[-1]["compilation"] - rows[1]["compilation"]
    assert len(slow) == 5 and compiled == pytest.approx(sum(slow[1:]), rel=0.05)
    seconds = goodput(tmp_path)
    assert seconds["compilation"] == pytest.approx(rows[-1]["compilation"])
    assert sum(seconds.values()) <= total and seconds["steps"] < total - sum(slow)


SCRIPT = """
import json, os, signal, sys, time
from haiku_template.runs import train
from tests.training.test_skipping import trainer

workdir, kill = sys.argv[1], int(sys.argv[2])


def hook(event):
    if event.what != "step":
        return
    time.sleep(0.04)
    with open(workdir + "/times", "a") as file:
        print(json.dumps([event.step, time.time()]), file=file, flush=True)
    if event.step == kill:
        os.kill(os.getpid(), signal.SIGKILL)


os.makedirs(workdir, exist_ok=True)
run = {"num_steps": 140, "save_every": 40, "log_every": 1, "workdir": workdir}
train(trainer({}), hooks=[hook], **run)
"""


@pytest.mark.slow
def test_a_command_counts_its_start_and_what_it_compiled(tmp_path, command):
    flags = ["--config=configs/digits.py", "--config.optimizer.warmup_steps=1"]
    begun = time.perf_counter()
    done = command("train", *flags, "--config.num_steps=3", f"--workdir={tmp_path}")
    total = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    seconds = goodput(tmp_path)
    assert sum(seconds.values()) == pytest.approx(total, rel=0.1, abs=1.0)
    assert seconds["starting"] > 1.0 and seconds["compilation"] > 0


@pytest.mark.slow
def test_lost_seconds_are_those_of_known_losses(tmp_path):
    """C47: two kills, each 39 steps after a save; within 5 %.

    The line of the last step is not written by then.
    """
    for kill in (79, 119, 0):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(kill)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": UNDRAWN, "JAX_PLATFORMS": "cpu"},
            timeout=200,
            capture_output=True,
            text=True,
        )
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    ends = {}  # Of the steps of each start: a step that is lower begins another.
    starts = [ends]
    for step, when in rows:
        if ends and step < max(ends):
            starts.append(ends := {})
        ends[step] = when
    assert len(starts) == 3 and [min(x) for x in starts] == [1, 41, 81]
    # From the step after a save on.
    truth = [y[x + 38] - y[x] + 0.04 for x, y in zip((41, 81), starts, strict=False)]
    seconds = goodput(tmp_path)
    assert seconds["lost killed"] == pytest.approx(sum(truth), rel=0.05)
    assert "lost killed" in done.stdout


def goodput_of(path, *rows):
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (path / "goodput.jsonl").write_text(text)
    return goodput(path)


def test_steps_that_a_later_start_made_again_are_lost(tmp_path):
    rows = [
        {"time": 0.0, "step": 0, "began": 0.0},
        {"time": 100.0, "step": 100, "code": 75},
    ]
    rows += [{"time": 200.0, "step": 100, "began": 200.0}]
    rows += [{"time": 210.0, "step": 110, "code": 70}]
    rows += [{"time": 300.0, "step": 40, "began": 300.0}]  # Of --rewind.
    rows += [{"time": 460.0, "step": 200, "code": 0}]
    assert goodput_of(tmp_path, *rows) == {"steps": 200, "lost 75": 60, "lost 70": 10}


def test_a_start_behind_half_a_line_is_read(tmp_path):
    rows = [{"time": 0.0, "step": 0, "began": 0.0}, {"time": 10.0, "step": 10}]
    rows += [{"time": 100.0, "step": 10, "began": 100.0}, {"time": 110.0, "step": 20}]
    lines = [json.dumps(row) for row in rows]
    half = lines[1][:20]
    (tmp_path / "goodput.jsonl").write_text(
        "\n".join([*lines[:2], half + lines[2], lines[3]])
    )
    assert goodput(tmp_path) == {"steps": 20.0}


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_beside_a_run_takes_no_seconds(
    tmp_path, monkeypatch, hours
):
    clock = time.time
    progress = Progress(tmp_path, 0, Ledger())
    time.sleep(0.2)
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
    progress.add(10)
    progress.close()
    assert 0.2 <= goodput(tmp_path)["steps"] < 60


def test_a_command_is_charged_to_the_first_run_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(Progress, "is_of_command", True)
    monkeypatch.setitem(COMPILED, "compilation", 1e-3)  # Of what is before a run.
    spent = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Progress(tmp_path / name, 0, Ledger()).close()
        spent.append(goodput(tmp_path / name))
    assert spent[0]["compilation"] == 1e-3 and spent[0]["starting"] > 0.2
    assert "compilation" not in spent[1] and spent[1].get("starting", 0.0) < 0.1

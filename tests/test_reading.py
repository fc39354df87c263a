"""What a reader opens to follow one batch, and all that a run enters: traced."""

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import digits
from haiku_template.runs import train
from haiku_template.training import Experiment

PACKAGE = Path(__file__).parents[1] / "haiku_template"
ROWS = 52  # Of a batch; no parameter has as many.


def holds(value, depth=0):
    """Tests for a batch, a part of one, or scalars and metrics made of it."""
    if isinstance(value, np.ndarray | jax.Array):
        return value.shape[:1] == (ROWS,)
    if isinstance(value, dict) and any("loss" in str(name) for name in value):
        return True
    if depth == 3 or not isinstance(value, dict | tuple | list):
        return False
    values = value.values() if isinstance(value, dict) else value
    return len(values) < 40 and any(holds(item, depth + 1) for item in values)


def test_a_batch_passes_twelve_files_from_the_data_set_to_a_metric(
    one_device, tmp_path
):
    passed, watching = set(), [False]

    def look(frame, event, result):
        file = Path(frame.f_code.co_filename)
        if watching[0] and event in ("call", "return") and PACKAGE in file.parents:
            values = frame.f_locals.values() if event == "call" else [result]
            if any(map(holds, values)):
                passed.add(str(file.relative_to(PACKAGE)))

    def watch(event):
        if event.what == "step":
            watching[0] = 5 <= event.step < 35

    config = digits.get_config()
    config.batch_size, config.steps_per_call = ROWS, 5
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        train(trainer, num_steps=36, workdir=tmp_path, log_every=5, hooks=[watch])
    finally:
        threading.setprofile(None)
        sys.setprofile(before)
    assert {"data/dataset.py", "runs/loop.py", "storage/metrics.py"} < passed
    assert len(passed) <= 12, " ".join(sorted(passed))
    # What the README names, and those of which docs/reading.md names a function.
    readme = (PACKAGE.parent / "README.md").read_text()
    looked_up = {"devices/transfer.py", "models/losses.py", "runs/guards.py"}
    writing = {"reporting/report.py", "reporting/display.py", "storage/metrics.py"}
    assert {x for x in passed if f"`{x}`" not in readme} <= looked_up | writing


# Lines of the functions that a short training of digits enters, docstrings among them,
# and their files. Moving code lowers neither.
LINES, FILES = 5_142, 61
TRACED = """
import runpy, sys, threading
entered = set()
def look(frame, event, arg):
    code = frame.f_code
    if event == "call" and PACKAGE in code.co_filename:
        entered.add((code.co_filename, code.co_firstlineno, code.co_name))
PACKAGE, *sys.argv = sys.argv[1:]
threading.setprofile(look)
sys.setprofile(look)
try:
    runpy.run_module("haiku_template.train", run_name="__main__")
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    for file, line, name in entered:
        print("ENTERED", line, name, file)
"""


def functions(file):
    """Lines of each function of a file, by its first line."""
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(x.lineno for x in decorators)])
            yield first, range(first, node.end_lineno + 1)


@pytest.mark.slow
def test_a_run_enters_few_lines(tmp_path):
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path / 'run'}"]
    flags += ["--device=cpu", "--config.num_steps=12", "--config.log_every=5"]
    done = subprocess.run(
        [sys.executable, "-c", TRACED, f"{PACKAGE}/", "train", *flags],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    entered = {}
    for line in done.stdout.splitlines():
        if line.startswith("ENTERED"):
            _, first, _, file = line.split(maxsplit=3)
            lines = dict(functions(file)).get(int(first), ())
            entered.setdefault(file, set()).update(lines)
    files = {file: lines for file, lines in entered.items() if lines}
    assert sum(map(len, files.values())) <= LINES and len(files) <= FILES
    assert len(files) > 30  # It was traced.
    # What the README says of the files that it names, to a twentieth.
    table = (PACKAGE.parent / "README.md").read_text().partition("## Read this")[2]
    names = re.findall(r"`([a-z/]+\.py)`", table.partition("\nIn the step's")[0])
    paths = [PACKAGE / name for name in names]
    count, total, entered = re.search(
        r"(\d+) files, ([\d,]+) lines.*?runs ([\d,]+) of", table, re.S
    ).groups()
    assert int(count) == len(paths)
    lines = sum(path.read_text().count("\n") for path in paths)
    assert lines == pytest.approx(int(total.replace(",", "")), rel=0.05)
    lines = sum(len(files[str(path)]) for path in paths)
    assert lines == pytest.approx(int(entered.replace(",", "")), rel=0.05)

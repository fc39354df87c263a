"""What a run shows in a notebook and in a log, where FORCE_COLOR is set."""

import nbformat
import pytest

from tests.runs import run_command
from tests.test_notebooks import execute, kernel  # noqa: F401

CELL = """
import tempfile
from pathlib import Path
from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import start

config = digits.get_config()
config.num_steps, config.log_every, config.eval_every = 40, 5, 20
start.run(config, DeviceManager.create("cpu"), str(Path(tempfile.mkdtemp()) / "run"))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_notebook_has_one_line_that_changes_and_the_report(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    execute(notebook)
    outputs = notebook.cells[0].outputs
    text = "".join(x.text for x in outputs if x.output_type == "stream")
    assert "\x1b[" not in text and "━ starting" not in text
    shown = [x.data for x in outputs if x.output_type == "display_data"]
    lines = [x["text/plain"] for x in shown if "image/png" not in x]
    # Eight lines were shown in one place, and the last of them is there.
    assert len(lines) == 1 and lines[0].startswith("step     40/40  loss ")
    assert "step     20/40  eval loss" in text and "step     40/40  eval loss" in text
    assert "image/png" in shown[-1]


def test_a_log_has_plain_lines(tmp_path):
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}", "--device=cpu"]
    flags += ["--config.num_steps=10", "--config.log_every=5"]
    done = run_command("train", *flags, FORCE_COLOR="1", TTY_COMPATIBLE="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout and "starting" not in done.stdout
    lines = [x for x in done.stdout.splitlines() if x.startswith("step ")]
    assert len(lines) == 3 and lines[0].startswith("step      5/10  loss ")
    assert "accuracy" in lines[0] and "grad_norm" not in lines[0]

"""What a run shows on a terminal of 80 columns, in a log and in a notebook.

It is stored in `shown/`, with # for numbers that differ from run to run; after a change
`python -m tests.reporting.test_notebook` writes it anew.
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

from tests.runs import ROOT
from tests.test_notebooks import execute, kernel, kernel_variables  # noqa: F401

SHOWN = Path(__file__).parent / "shown"
FLAGS = ["--config=digits", "--workdir=run", "--device=cpu", "--config.num_steps=40"]
FLAGS += ["--config.log_every=20", "--config.eval_every=20"]
FLAGS += ["--config.optimizer.warmup_steps=20"]
COMMAND = [sys.executable, "-m", "haiku_template.train", *FLAGS]
# CI sets FORCE_COLOR, and ipykernel, too; neither is a terminal.
FORCED = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "PYTHONPATH": str(ROOT)}
CELL = """
import os
import tempfile
from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import start

os.chdir(tempfile.mkdtemp())
config = digits.get_config()
config.num_steps, config.log_every, config.eval_every = 40, 5, 20
config.optimizer.warmup_steps = 20
start.run(config, DeviceManager.create("cpu", num_devices=1), "run")
"""


def masked(text):
    """The text without what differs from run to run, and between versions of jax."""
    lines = []
    for line in text.splitlines():
        line = re.sub("━[━╸╺ ]*━", "━━", line.rstrip())
        line = re.sub(r"bound by [a-z\- ]+\d+%", "bound by PART #%", line)
        if re.match(r"step|memory|.*examples/s", line):
            step = re.match(r"step +\d+/\d+", line)
            begin = step[0] if step else ""
            rest = re.sub(r"\d[\d,.:]*(e-\d+)?", "#", line[len(begin) :])
            line = begin + re.sub(r"#( [KMG]iB)", "# MiB", rest)
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_terminal(data):
    """Lines of a terminal that got these bytes: what was drawn over is gone."""
    rows, row, column = [""], 0, 0
    for word in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|\r|\n|[^\x1b\r\n]+", data):
        if word == "\r":
            column = 0
        elif word == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif word[:2] == "\x1b[":
            number = int(re.sub(r"\D", "", word) or 1)
            row -= number * (word[-1] == "A")
            rows[row] = "" if word[-1] == "K" else rows[row]
        elif word[0] != "\x1b":
            line = rows[row].ljust(column)
            rows[row] = line[:column] + word + line[column + len(word) :]
            column += len(word)
    return "\n".join(rows).rstrip()


def terminal(folder):
    """What the command shows on a terminal of 80 columns."""
    ours, its = pty.openpty()
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    variables.pop("NO_COLOR", None)
    process = subprocess.Popen(
        COMMAND, cwd=folder, env=variables, stdin=its, stdout=its, stderr=its
    )
    os.close(its)
    data = b""
    while True:
        try:
            data += os.read(ours, 2**16)
        except OSError:  # The other end is closed.
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0, data.decode()
    return on_terminal(data.decode())


def log(folder):
    """What the command writes to a pipe."""
    done = subprocess.run(
        COMMAND,
        cwd=folder,
        env=os.environ | FORCED,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout
    return done.stdout


def notebook():
    """What a cell shows, its tables as HTML."""
    cells = [nbformat.v4.new_code_cell(CELL)]
    executed = nbformat.v4.new_notebook(cells=cells)
    execute(executed)
    parts = []
    for output in executed.cells[0].outputs:
        assert output.output_type != "error", output
        if output.output_type == "stream":
            parts.append(output.text)
        elif "image/png" in output.data:
            parts.append("[image/png]\n")
        else:
            html = output.data.get("text/html", "").replace("<tr>", "\n<tr>")
            parts.append(f"{html or output.data['text/plain']}\n")
    return "".join(parts)


def stored(name):
    return (SHOWN / f"{name}.txt").read_text()


def test_a_log_has_plain_lines(tmp_path):
    shown = masked(log(tmp_path))
    assert shown == stored("log")
    lines = [x for x in shown.splitlines() if x.startswith("step ")]
    assert len(lines) == 4 and "accuracy #" in lines[0] and "grad_norm" not in lines[0]


@pytest.mark.slow
def test_a_terminal_has_a_bar_and_no_line_beyond_its_edge(tmp_path):
    shown = masked(terminal(tmp_path))
    assert shown == stored("terminal")
    assert shown.count("━━ ") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_notebook_has_one_line_that_changes_tables_and_the_report(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    shown = masked(notebook())
    assert shown == stored("notebook")
    assert shown.rstrip().endswith("[image/png]") and "│" not in shown
    # Eight lines were shown in one place, and the last of them is there.
    lines = [x for x in shown.splitlines() if x.startswith("step ")]
    assert len([x for x in lines if "examples/s" in x]) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ |= kernel_variables(Path(home)) | {"PYTHONPATH": str(ROOT)}
        os.environ["JAX_PLATFORMS"] = "cpu"
        SHOWN.mkdir(exist_ok=True)
        for function in (log, terminal):
            with tempfile.TemporaryDirectory() as work:
                text = masked(function(Path(work)))
                (SHOWN / f"{function.__name__}.txt").write_text(text)
        (SHOWN / "notebook.txt").write_text(masked(notebook()))

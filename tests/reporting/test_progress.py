"""What a run shows on a terminal of 80 columns, in its log, and in its report."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from haiku_template.devices import DeviceManager, Layout
from haiku_template.reporting import Report, Work, display, plots
from tests.reporting.test_notebook import on_terminal

METRICS = {
    "train/loss": 0.0009687,
    "perf/steps_per_second": 12.5,
    "perf/examples_per_second": 1_296_810.0,
    "perf/to_devices_seconds": 0.7,
    "perf/other_seconds": 0.1,
}


def shown(thing, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    console.print(thing)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()


@pytest.mark.parametrize("step", [3, 200_000])
def test_eighty_columns_show_the_bar_and_what_bounds_the_run(tmp_path, step):
    with display.Display(tmp_path, 200_000) as live:
        live.train(step, METRICS, "12,406 MiB (host)")
        lines = shown(live._bar.get_renderable(), 80)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80 and len(lines) == 2
    assert "━━━━" in lines[0] and f"step {step}/200000" in lines[0]
    for words in (
        "loss 0.0009687",
        "1,296,810 examples/s",
        "ETA ",
        "bound by host-to-device 88%",
        "12,406 MiB (host)",
    ):
        assert words in text, text


def test_a_terminal_does_not_break_lines_inside_words(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    path = "/runs/" + 90 * "x"
    batch = "batch     128 examples, 128 on each device, 50 steps a call; 400 steps = "
    with display.Display(tmp_path, 3) as live:
        live.print(batch + "35.63 epochs", f"workdir   {path}, resumed", "a\n  b")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).splitlines()
    assert 10 * " " + "epochs" in lines
    assert f"{10 * ' '}{path}," in lines  # Copied as one word.
    assert [x for x in lines if len(x) > 80] == [f"{10 * ' '}{path},"]
    assert "  b" in lines
    assert batch + "35.63 epochs" in (tmp_path / display.LOG).read_text()


@pytest.mark.parametrize("width", [0, 1, 80])
def test_lines_of_any_terminal_are_broken_at_spaces_alone(width):
    text = f"batch     {12 * 'words '}and /a/{90 * 'x'}\n\tas it is"
    lines = display._in_width(text, width).split("\n")
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert lines[0].startswith("batch     words") and lines[-1] == "\tas it is"


def test_the_bar_is_not_drawn_again_below_the_last_line(
    tmp_path, monkeypatch, one_device
):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    feed = SimpleNamespace(batch_size=1)
    trainer = SimpleNamespace(devices=one_device, feed=feed, work=Work())
    with Report(tmp_path, trainer, num_steps=3, matmul_bytes=0) as report:
        report.begin(3, None)  # A run that resumes.
        report.finish(3)
    drawn = terminal.getvalue()
    assert drawn.rindex("step 3/3") > drawn.rindex("step 0/3")
    assert 0 < drawn.rindex("━") < drawn.rindex("done      step 3")


class Wrapped(logging.Handler):
    """Passes records on as absl's handler does."""

    def __init__(self, handler):
        super().__init__()
        self.python_handler = handler

    def handle(self, record):
        return self.python_handler.handle(record)


@pytest.mark.parametrize("wrap", [lambda x: x, Wrapped])
def test_the_bar_does_not_draw_over_a_warning(tmp_path, monkeypatch, wrap):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [wrap(handler)])
    warning = "this run's environment changed: " + "devices, " * 20
    with display.Display(tmp_path, 30) as live:
        live.train(1, METRICS, "12 MiB")
        logging.getLogger().warning(warning)
        live.train(2, METRICS, "12 MiB")
    assert handler.stream is terminal
    assert warning.strip() in on_terminal(terminal.getvalue())


class Tee:
    """A script's stream, which has what `print` and `logging` need."""

    def __init__(self, target):
        self.target, self.texts = target, []

    def write(self, text):
        self.texts.append(text)
        return self.target.write(text)

    def flush(self):
        self.target.flush()


@pytest.mark.parametrize("stream", ["none", "closed", "tee"])
def test_any_stream_of_errors_may_stand_beside_a_terminal(
    tmp_path, monkeypatch, stream
):
    """Such as of `2>&-`: the first draft asked it whether it is a terminal."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    closed = io.StringIO()
    closed.close()
    errors = {"none": None, "closed": closed, "tee": Tee(terminal)}[stream]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    own = logging.Handler()
    own.stream, own.emit = errors, lambda record: None
    handlers = [own] + ([logging.StreamHandler(errors)] if stream == "tee" else [])
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    with display.Display(tmp_path, 30) as live:
        live.train(1, METRICS, "12 MiB")
        logging.getLogger().warning("it is warm")
    assert stream != "tee" or "it is warm\n" in "".join(errors.texts)


def gpt(num_blocks):
    leaves = {"embed": {"w": jnp.zeros((50, 8))}}
    for i in range(num_blocks):
        for name in ("attention/qkv", "attention/out", "mlp/up", "mlp/down"):
            leaves[f"gpt/block_{i}/{name}"] = {
                "w": jnp.zeros((8, 8)),
                "b": jnp.zeros(8),
            }
    return leaves


@pytest.mark.parametrize("num_blocks", [4, 12, 48])
def test_many_parameters_are_folded_by_module_and_whole_in_the_log(
    tmp_path, capsys, num_blocks
):
    params = gpt(num_blocks)
    total = sum(x.nbytes for module in params.values() for x in module.values())
    with display.Display(tmp_path, 1) as live:
        live.print(display.parameter_tables(params))
    screen, log = capsys.readouterr().out, (tmp_path / "train.log").read_text()
    assert len(screen.splitlines()) <= display.ROWS + 8
    assert ("gpt/block_*" if num_blocks > 4 else "gpt/block_3/mlp/up") in screen
    assert f"{8 * num_blocks} leaves" not in log
    assert "train.log" in screen
    for i in range(num_blocks):
        assert f"gpt/block_{i}/mlp/down/w" in log
    for text in (screen, log):
        assert f"{total:,}" in text


def test_few_parameters_are_a_row_each(tmp_path, capsys):
    with display.Display(tmp_path, 1) as live:
        live.print(display.parameter_tables(gpt(1)))
    assert "gpt/block_0/mlp/down/w" in capsys.readouterr().out


def test_the_report_has_a_panel_for_each_metric_that_exists_and_no_other():
    rows = [
        {"step": 1, "train/loss": 1.0, "train/recall": 0.1, "perf/data_seconds": 1.0},
        {"step": 2, "eval/loss": 0.5, "eval/recall": 0.4, "eval/bleu": None},
    ]
    panels = plots.panels(rows)
    assert list(panels) == ["loss", "recall"]
    assert panels["loss"] == {"train/loss": [(1, 1.0)], "eval/loss": [(2, 0.5)]}


@pytest.mark.parametrize(
    ("losses", "scale"), [((1.0, 0.1), "log"), ((1.0, -0.1), "linear")]
)
def test_a_loss_below_zero_is_drawn(losses, scale):
    rows = [{"step": i, "train/loss": loss} for i, loss in enumerate(losses)]
    ((title, lines),) = plots.panels(rows).items()
    assert plots.scale(title, lines) == scale and len(lines["train/loss"]) == 2


def test_the_report_draws_any_number_of_panels(tmp_path):
    for count in (0, 1, 5):
        row = {"step": 1} | {f"train/m{i}": -i for i in range(count)}
        assert plots.write(tmp_path, [row]).read_bytes().startswith(b"\x89PNG")


def test_bytes_of_a_sharded_parameter_are_those_of_a_device():
    devices = DeviceManager.create("cpu", num_devices=2)
    layout = Layout(devices.devices, (("*", "data"),))
    params = devices.place({"a": {"w": np.zeros((8, 4), np.float32)}}, layout)
    table, _ = display.parameter_tables(params)
    assert [*table.columns[3].cells][-1] == "64"

import contextlib
import itertools
import json
import math
import tracemalloc
from types import SimpleNamespace

import pytest

from haiku_template.reporting import goodput, plots, report, trackers
from haiku_template.runs import comparison
from haiku_template.storage import metrics
from haiku_template.storage.metrics import MetricsWriter, read

# Records that tensorboardX 2.6.5 wrote of the same events, at 1.5 s.
SCALARS = {"train/loss": 1.0, "é" * 70: math.inf, "large": 1e300}
SCALARS |= {"zero": 0.0, "nan": math.nan}
VERSION = (
    "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
)
RESUMED = "100000000000000095fbfe1809000000000000f83f10ad023a020801d17949d4"
SUMMARY = (
    "df000000000000005327f07109000000000000f83f10012ad1010a110a0a747261696e2f6c6f7373"
    "150000803f0a94010a8c01c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9150000807f0a0c0a05"
    "6c61726765150000807f0a0b0a047a65726f15000000000a0a0a036e616e150000c07fa887fcee"
)


def test_lines_keep_full_precision(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        write(1, {"train/loss": math.pi})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": math.pi}]


def test_going_on_takes_back_what_was_written_after(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        for step in (10, 20, 30):
            write(step, {"train/loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')  # A kill in the middle of a line.
    with contextlib.closing(MetricsWriter(tmp_path, 20)) as write:
        write(30, {"train/loss": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in text] == [10, 20, 30]
    assert json.loads(text[-1])["train/loss"] == 0.5


def test_a_start_that_was_killed_as_it_resumed_leaves_no_half_of_a_long_file(tmp_path):
    (tmp_path / ".metrics.jsonl.4711").write_text('{"step": 1}')
    (tmp_path / ".metrics.jsonl.copied").touch()  # In a run's mirror.
    MetricsWriter(tmp_path, 0).close()
    names = {".metrics.jsonl.copied", "metrics.jsonl", "tensorboard"}
    assert {x.name for x in tmp_path.iterdir()} == names


def test_tensorboard_events_are_written(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        write(1, {"train/loss": 1.0})
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/loss" in files[0].read_bytes()


@pytest.mark.parametrize(
    ("field", "contents", "step", "record"),
    [
        (metrics.FILE_VERSION, b"brain.Event:2", 0, VERSION),
        (metrics.SESSION_LOG, b"\x08\x01", 301, RESUMED),
        (metrics.SUMMARY, metrics.summary(SCALARS), 1, SUMMARY),
    ],
    ids=["version", "resumed", "scalars"],
)
def test_events_are_byte_for_byte_as_tensorboardx_writes_them(
    monkeypatch, field, contents, step, record
):
    monkeypatch.setattr(metrics.time, "time", lambda: 1.5)
    assert metrics.event(field, contents, step).hex() == record


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_the_report_is_drawn_for_any_number_of_lines(tmp_path, rows):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        for step in range(1, rows + 1):
            write(step, {"train/loss": 1 / step, "train/learning_rate": 0.1})
            write(step, {"eval/loss": 1 / step})
    picture = plots.write(tmp_path, read(tmp_path / "metrics.jsonl"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def write_rows(path, number):
    row = {f"train/{name}": 0.1 for name in ("loss", "grad_norm", "learning_rate")}
    with path.open("w") as file:
        for step in range(1, number + 1):
            file.write(json.dumps({"step": step} | row) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "eval/loss": 1 / step}) + "\n")


def kib_of(function):
    """KiB that Python holds at most while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] // 1024
    finally:
        tracemalloc.stop()


LONG = {
    "a resume": lambda folder: MetricsWriter(folder, 19_000).close(),
    "a sample": lambda folder: metrics.sampled(folder / "metrics.jsonl", most=10_000),
    "a CSV": lambda folder: trackers.csv_writer(folder, 0)(1, {"train/loss": 1.0}),
    "goodput": lambda folder: goodput.goodput(folder),
}


@pytest.mark.parametrize("what", LONG)
def test_a_long_run_is_read_line_by_line(tmp_path, what):
    """A run overnight has a million rows."""
    (tmp_path / "config.json").write_text("{}")
    LONG[what](tmp_path)  # What it imports stays.
    write_rows(tmp_path / "metrics.jsonl", 20_000)
    times = [{"time": float(i), "step": i} for i in range(20_000)]
    rows = [times[0] | {"began": 0.0}, *times[1:]]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "goodput.jsonl").write_text(text)
    assert kib_of(lambda: LONG[what](tmp_path)) < 500


def test_a_sample_is_even_and_has_all_evaluations_and_the_end(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", 20_000)
    rows = metrics.sampled(tmp_path / "metrics.jsonl", most=10_000)
    steps = [row["step"] for row in rows if "train/loss" in row]
    evaluated = [row["step"] for row in rows if "eval/loss" in row]
    assert evaluated == [*range(1000, 20_001, 1000)]
    assert 50 < len(steps) < 200 and steps == sorted(steps) and steps[-1] == 20_000
    assert max(b - a for a, b in itertools.pairwise(steps)) < 250
    (tmp_path / "config.json").write_text("{}")
    summary = comparison.summarize_run(tmp_path, metric="train/loss", mode="min")
    # There may be 2,000 runs, and all are held for the picture.
    assert len(summary.rows) < 3_000 and summary.best == (0.1, 1)
    write_rows(tmp_path / "metrics.jsonl", 2_000)
    rows = read(tmp_path / "metrics.jsonl")
    assert metrics.sampled(tmp_path / "metrics.jsonl") == rows and len(rows) == 2_002
    assert metrics.sampled(tmp_path / "none") == []


def test_a_run_ends_with_the_last_of_each_metric_and_not_of_a_sample(tmp_path):
    """As that of steps which were skipped before a resumed run's start."""
    name = f"train/{'x' * 300}"
    rows = [{"step": i, name: 1 / i} for i in range(1, 20_001)]
    rows[10_001] |= {"train/rare": 3.0}  # Not of the rows that are sampled.
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    chosen = metrics.sampled(tmp_path / "metrics.jsonl")
    assert "train/rare" not in {k for row in chosen for k in row}
    display = SimpleNamespace(stop=lambda: None, in_notebook=False)
    run = SimpleNamespace(workdir=tmp_path, _start=0, _follows=True, _display=display)
    run.print = lambda *_: None
    last = {name: 1 / 20_000, "train/rare": 3.0}
    assert report.Report.finish(run, 20_000) == last


def test_the_curves_of_many_runs_have_room_beside_their_names(tmp_path):
    """Of no room matplotlib warns, and the picture is of names alone."""
    rows = [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 0.5}]
    runs = {f"run {i}": rows for i in range(500)}
    assert plots.write_comparison(tmp_path / "many.png", runs, ["train/loss"])


def test_a_reader_goes_on_where_it_was_and_leaves_half_a_line(tmp_path):
    file, reader = (
        tmp_path / "metrics.jsonl",
        metrics.Reader(tmp_path / "metrics.jsonl"),
    )
    assert reader() == []
    file.write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2')
    assert reader() == [{"step": 1, "train/loss": 0.5}]
    with file.open("a") as opened:
        opened.write(', "eval/loss": null}\n')
    assert reader() == read(file) and len(reader()) == 2

"""Row C23 of the reliability bench: back to a good step, and on without bad ones."""

import errno
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.data import digits as load
from haiku_template.devices.checks import device_index
from haiku_template.errors import ConfigError, NonFiniteError
from haiku_template.runs import start, train
from haiku_template.runs.outliers import located
from haiku_template.runs.rewind import go_back, record, steps_of
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.metrics import read
from haiku_template.storage.workdir import left_out, locked
from tests.test_commands import digest, numbers
from tests.training.test_skipping import INPUTS, LABELS, each_place, trainer

RUN = {"num_steps": 40, "save_every": 4, "log_every": 1, "keep_last": 20}
BAD = {11: np.nan}


def ended(workdir, values=BAD, *place, **options):
    """A run that a batch ended, and went back from."""
    with pytest.raises(NonFiniteError):
        train(trainer(values, *place), workdir=workdir, **RUN | options)
    go_back(workdir, "auto")
    return workdir


def steps(workdir, kind=""):
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    names = [x.removesuffix(kind) for x in names if x.endswith(kind)]
    return sorted(int(name) for name in names if name.isdecimal())


def losses(workdir):
    rows = read(workdir / "metrics.jsonl")
    return {row["step"]: row["train/loss"] for row in rows}


@each_place
@pytest.mark.slow(but="4-7")
def test_a_run_that_went_back_ends_without_the_batch(tmp_path, num_devices, count):
    """And bitwise so when it is stopped before, at and after that step."""
    place = num_devices, count
    clean, workdir = tmp_path / "clean", tmp_path / "run"
    for name in ("run", "stopped"):
        ended(tmp_path / name, BAD, *place)
        assert left_out(tmp_path / name) == [11] and steps(tmp_path / name) == [4, 8]
    result = train(trainer(BAD, *place), workdir=workdir, **RUN)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))
    assert int(result.state.step) == 40
    train(trainer({}, *place), workdir=clean, **RUN)
    seen, expected = losses(workdir), losses(clean)
    assert seen.keys() == expected.keys()
    assert [step for step in seen if seen[step] is None] == [11]
    assert {k: seen[k] for k in range(1, 11)} == {k: expected[k] for k in range(1, 11)}
    # Within noise: one batch of forty less.
    last = [np.mean([x[k] for k in range(31, 41)]) for x in (seen, expected)]
    assert abs(last[0] - last[1]) < 0.05 * last[1]
    stopped = {**RUN, "workdir": tmp_path / "stopped"}
    for stop in (10, 11, 12, 40):
        train(trainer(BAD, *place), **stopped | {"num_steps": stop})
    assert digest(tmp_path / "stopped") == digest(workdir)
    assert numbers(tmp_path / "stopped") == numbers(workdir)


def test_a_left_out_step_is_as_a_skipped_one(tmp_path):
    """The rest of the run is, to rounding, that of a run that skipped the step."""
    train(trainer(BAD), workdir=ended(tmp_path / "run"), **RUN)
    skips = RUN | {"max_consecutive_nonfinite": 2, "workdir": tmp_path / "skips"}
    train(trainer(BAD), **skips)
    first, second = losses(tmp_path / "run"), losses(tmp_path / "skips")
    for step in range(12, 41):
        assert first[step] == pytest.approx(second[step], rel=1e-4)


def test_the_same_command_goes_back_once(tmp_path):
    workdir = ended(tmp_path)
    train(trainer(BAD), workdir=workdir, **RUN | {"num_steps": 20})
    for text in ("auto", "11"):
        go_back(workdir, text)
        assert steps(workdir) == [4, 8, 12, 16, 20] and left_out(workdir) == [11]


def test_later_bad_steps_join_the_first(tmp_path):
    values = BAD | {23: np.inf}
    workdir = ended(tmp_path, values)
    ended(workdir, values)
    assert left_out(workdir) == [11, 23] and steps(workdir) == [4, 8, 12, 16, 20]
    train(trainer(values), workdir=workdir, **RUN)
    assert [k for k, x in losses(workdir).items() if x is None] == [11, 23]


def test_steps_of_a_spike_are_named_and_newer_checkpoints_renamed(tmp_path):
    train(trainer({}), workdir=tmp_path, **RUN)
    go_back(tmp_path, "18:19,30")
    assert steps(tmp_path) == [4, 8, 12, 16]
    assert steps(tmp_path, ".rewound") == [20, 24, 28, 32, 36, 40]
    train(trainer({}), workdir=tmp_path, **RUN)
    assert [k for k, x in losses(tmp_path).items() if x is None] == [18, 19, 30]


def test_a_gradient_that_made_the_state_infinite_is_recorded(tmp_path):
    """C22: its loss is finite, and that of the next step is not."""
    values = {11: 1e25}
    ended(tmp_path, values)
    assert left_out(tmp_path)[0] == 11
    train(trainer(values), workdir=tmp_path, **RUN)
    assert set(left_out(tmp_path)) == {k for k, x in losses(tmp_path).items() if not x}


def test_the_rows_of_a_batch_are_recorded(tmp_path):
    """C22: ids of the batch, where the data set has them."""
    data = ArrayDataset(INPUTS[0], LABELS[0], BatchSpec(4))
    record(tmp_path, data, [1, 2])
    values = json.loads((tmp_path / "nonfinite.json").read_text())
    rows = {str(step): data.rows(step - 1).tolist() for step in (1, 2)}
    assert values == {"steps": [1, 2], "rows": rows}


def test_data_on_the_devices_are_left_out_too(tmp_path):
    data = ArrayDataset(INPUTS.reshape(-1, 6), LABELS.reshape(-1), BatchSpec(8))
    run = {**RUN, "workdir": tmp_path}
    made = trainer(Data(data, None, 2), 4, 7, placement="device")
    train(made, **run)
    go_back(tmp_path, "14")
    train(trainer(Data(data, None, 2), 4, 7, placement="device"), **run)
    assert [k for k, x in losses(tmp_path).items() if x is None] == [14]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("11,", "--rewind=11, is not understood; possible are auto"),
        ("0", "not understood"),
        ("9:3", "not understood"),
        ("1:99999999", "not understood"),
        ("-3", "not understood"),
        ("4", r"checkpoint before step 4, and .* has \[4, 8, 12, 16, 20\]"),
    ],
)
def test_what_cannot_be_left_out_is_refused(tmp_path_factory, finished, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        go_back(finished, text)
    assert caught.value.exit_code == 64 and not left_out(finished)
    assert steps(finished) == [4, 8, 12, 16, 20]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    train(trainer({}), workdir=workdir, **RUN | {"num_steps": 20})
    return workdir


def test_a_run_that_is_alive_is_left_alone(finished):
    with locked(finished), pytest.raises(ConfigError, match="another run is writing"):
        go_back(finished, "18")


def test_without_a_record_there_is_nothing_to_go_back_from(finished):
    assert steps_of("auto", finished) == set()
    go_back(finished, "auto")
    assert steps(finished) == [4, 8, 12, 16, 20]


def test_a_step_that_the_run_never_makes_is_refused(finished, caplog):
    with pytest.raises(ConfigError, match="4000 is beyond config.num_steps=20"):
        go_back(finished, "4000", last=20)
    assert not left_out(finished)
    with pytest.raises(ConfigError, match="20 is beyond config.num_steps=19"):
        go_back(finished, "20", last=19)
    go_back(finished, "auto", last=20)
    assert "no step is recorded, and none is left out" in caplog.text


class Poisoned:
    """A NaN in the pixels of some steps, which count from 1."""

    def __init__(self, dataset, steps):
        self.dataset, self.steps = dataset, steps

    def batch(self, step):
        batch = self.dataset.batch(step)
        factor = np.float32(np.nan if step + 1 in self.steps else 1)
        return batch | {"inputs": factor * batch["inputs"]}


def poisoned(spec):
    data = load(spec)
    return data._replace(train=Poisoned(data.train, [7]), evaluation=None)


def test_the_command_goes_back(tmp_path, one_device):
    config = digits.get_config()
    config.num_steps, config.save_every, config.log_every = 12, 3, 1
    config.optimizer.schedule = "constant"
    config.data = {"name": f"{__name__}:poisoned"}
    run = config, one_device, str(tmp_path)
    with pytest.raises(NonFiniteError, match="loss of step 7 is"):
        start.run(*run)
    record = json.loads((tmp_path / "nonfinite.json").read_text())
    assert record == {"steps": [7], "rows": {}}
    start.run(*run, dry_run=True, rewind="auto")
    assert left_out(tmp_path) == []
    for _ in range(2):
        start.run(*run, rewind="auto")
        assert left_out(tmp_path) == [7] and steps(tmp_path)[-1] == 12


BAD_DIGITS = 40, 120, 121, 230


def spoilt(spec):
    data = load(spec)
    return data._replace(train=Poisoned(data.train, BAD_DIGITS))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["skipped", "left out"])
def test_without_some_batches_a_run_ends_within_noise_of_a_clean_one(
    tmp_path, one_device, way
):
    """C21, C23: its test loss is nearer than those of other seeds are."""

    def loss(name, seed=0, steps=(), **changes):
        config = digits.get_config()
        config.seed, config.num_steps, config.eval_every = seed, 300, 300
        config.save_every, config.keep_last = 25, 20
        with config.unlocked():
            config.update(changes)
        workdir = tmp_path / name
        if steps:
            with pytest.raises(NonFiniteError):
                start.run(config, one_device, str(workdir))
            go_back(workdir, ",".join(map(str, steps)))
        start.run(config, one_device, str(workdir))
        rows = read(workdir / "metrics.jsonl")
        (value,) = [row["eval/loss"] for row in rows if "eval/loss" in row]
        return value, sum(row.get("train/skipped_steps", 0) for row in rows[-2:])

    clean = [loss(f"clean{seed}", seed)[0] for seed in range(5)]
    changes = {"data": {"name": f"{__name__}:spoilt"}}
    if way == "skipped":
        value, skipped = loss(way, max_consecutive_nonfinite=3, **changes)
        assert skipped == len(BAD_DIGITS)
    else:
        value, _ = loss(way, steps=BAD_DIGITS, **changes)
        assert left_out(tmp_path / way) == list(BAD_DIGITS)
    assert value != clean[0]
    assert abs(value - clean[0]) < np.std(clean, ddof=1)


def test_the_rows_of_a_step_are_those_of_all_processes(tmp_path):
    rows = {}
    for count in (1, 2):
        data = ArrayDataset(INPUTS, LABELS, BatchSpec(8, process_count=count))
        record(tmp_path, data, [3])
        rows[count] = json.loads((tmp_path / "nonfinite.json").read_text())["rows"]
    assert rows[1] == rows[2] and len(rows[1]["3"]) == 8


def test_a_row_of_a_whole_batch_is_on_a_device_of_any_process():
    everyone = [SimpleNamespace(platform="cpu", id=i, process_index=i) for i in (0, 1)]
    for device in everyone:
        device.local_hardware_id = 0
    devices = SimpleNamespace(devices=everyone[:1], everyone=everyone)
    devices.processes = SimpleNamespace(name=" in process 0 of 2")
    feed = SimpleNamespace(batch_size=128)
    owner = SimpleNamespace(devices=devices, feed=feed)
    words = "row 100, which is on cpu:{} in process {}"
    assert located(owner, 100, 128) == words.format(device_index(everyone[1]), 1)
    assert located(owner, 50, 64) == "row 50, which is on cpu:0 in process 0"


def test_a_rewind_on_a_full_disk_is_a_sentence(finished, tmp_path, monkeypatch):
    shutil.copytree(finished, tmp_path / "run")

    def full(path, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workdirs, "write_json", full)
    with pytest.raises(ConfigError, match="cannot be written to.*No space left"):
        go_back(tmp_path / "run", "18")

"""Options for runs that survive, in two processes: as in one."""

import shutil
import subprocess

import pytest

from haiku_template.storage import workdir as workdirs
from tests.cluster.test_several import (
    ENVIRONMENT,
    LAUNCH,
    ROOT,
    assert_same,
    command,
    metrics,
    train,
)

pytestmark = pytest.mark.cluster
ALL = {"sharding": "(('*','data'),)"}
EACH_LAYOUT = pytest.mark.parametrize("layout", [{}, ALL], ids=["whole", "sharded"])


def rewound(steps, processes, *given, **changes):
    """What a run prints that goes back."""
    whole = [*LAUNCH, f"--processes={processes}", "--", *command(*given, **changes)]
    done = subprocess.run(
        [*whole, f"--rewind={steps}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@EACH_LAYOUT
def test_a_run_goes_back_and_leaves_steps_out(tmp_path, layout):
    alone, workdir = tmp_path / "alone", tmp_path / "run"
    for processes, devices, folder in ((1, 2, alone), (2, 1, workdir)):
        changes = layout | {"save_every": 4, "log_every": 1, "keep_last": 9}
        train(processes, folder, devices, **changes)
        code, printed = rewound("7,10:11", processes, folder, devices, **changes)
        assert code == 0 and workdirs.left_out(folder) == [7, 10, 11], printed
        lost = [x["step"] for x in metrics(folder) if x.get("train/loss", 0) is None]
        assert lost == [7, 10, 11]
    assert_same(workdir, alone, but=lost)


def test_a_run_of_two_that_cannot_go_back_says_so_once(tmp_path):
    train(2, tmp_path / "run", 1)
    code, printed = rewound("4", 2, tmp_path / "run", 1)
    assert code == 64 and printed.count("error: --rewind goes back to") == 1, printed
    assert "error: process 0 on " in printed and "Traceback" not in printed


@EACH_LAYOUT
def test_a_lost_workdir_comes_back_from_the_mirror(tmp_path, layout):
    mirror, workdir, whole = tmp_path / "mirror", tmp_path / "run", tmp_path / "whole"
    changes = layout | {"mirror": mirror, "num_steps": 10}
    train(2, workdir, 1, **changes)
    assert workdirs.saved_steps(mirror / "checkpoints") == [10]
    shutil.rmtree(workdir)
    printed = train(2, workdir, 1, **changes | {"num_steps": 20})
    assert "those of steps [10] are copied there" in printed
    train(2, whole, 1, **layout)
    rows, of_whole = metrics(workdir), metrics(whole)  # The mirror has the first lines.
    assert [x for x in rows if x["step"] > 10] == [
        x for x in of_whole if x["step"] > 10
    ]
    assert rows[0] == of_whole[0]
    # A step that is damaged in the workdir alone is read from the mirror.
    manifest = workdir / "checkpoints/20/manifest"
    shutil.rmtree(manifest)
    printed = train(2, workdir, 1, **changes | {"num_steps": 25})
    assert "step 20 is that of" in printed


@EACH_LAYOUT
def test_replayed_steps_have_the_same_bits(tmp_path, layout):
    for name, replay in (
        ("plain", {}),
        ("replayed", {"sdc_replay": "first:3,every:5"}),
    ):
        train(2, tmp_path / name, 1, **layout | replay)
    assert metrics(tmp_path / "replayed") == metrics(tmp_path / "plain")


def test_saves_by_minutes_are_of_the_same_steps(tmp_path):
    train(2, tmp_path, 1, num_steps=60, save_every=None, save_minutes=0.0)
    assert workdirs.saved_steps(tmp_path / "checkpoints")[-1] == 60

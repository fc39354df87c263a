"""The script of Slurm's recipe, run by bash with an srun and scontrol that do little.

`test_slurm.py` runs it under a real Slurm, which takes minutes.
"""

import os
import re
import subprocess

import pytest

from tests.runs import ROOT

SCRIPT = ROOT / "launch/slurm.sbatch"
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun.words
while [[ $1 = --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
  *show*) echo "JobId=7 JobState=$STATE" ;;
  requeue*) touch requeued ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """Starts the job with a command for bash; gives its code, output and requeueing."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}

    def start(command, state="RUNNING", **more):
        done = subprocess.run(
            ["bash", str(SCRIPT), "bash", "-c", command, "run", "--workdir=w"],
            cwd=tmp_path,
            env=variables | {"STATE": state} | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        mark = tmp_path / "requeued"
        is_queued = mark.exists()
        mark.unlink(missing_ok=True)
        return done.returncode, done.stdout, is_queued

    return start


def test_it_asks_for_what_an_admin_asks_of_it(job, tmp_path):
    options = re.findall(r"^#SBATCH (\S+)$", SCRIPT.read_text(), re.M)
    asked = {"--mem=0", "--exclusive", "--requeue", "--signal=TERM@300"}
    assert asked <= {*options} and "--open-mode=append" in options
    code, printed, _ = job("env")
    assert code == 0
    told = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    assert told["NCCL_DEBUG"] == "WARN"
    # A folder that all nodes share, as the home is.
    assert told["JAX_COMPILATION_CACHE_DIR"].startswith(f"{tmp_path}/")
    given = job("env", NCCL_DEBUG="INFO", JAX_COMPILATION_CACHE_DIR="/shared/c")[1]
    assert "NCCL_DEBUG=INFO\n" in given
    assert "JAX_COMPILATION_CACHE_DIR=/shared/c\n" in given
    words = (tmp_path / "srun.words").read_text().splitlines()
    # Who lost a process has time to say so.
    assert {"--kill-on-bad-exit=0", "--wait=300", "--cpus-per-task=3"} <= {*words}


SAVES = "mkdir -p w/checkpoints/{}; exit 69"


@pytest.mark.parametrize(
    ("starts", "queued"),
    [
        (["exit 69"] * 3, [True, True, False]),
        (["exit 75"] * 5, [True] * 5),
        (["exit 69", "exit 75", "exit 69", "exit 75", "exit 69"], [True] * 4 + [False]),
        ([SAVES.format(n) for n in (5, 10, 100, 105)], [True] * 4),
        (["exit 69", "exit 69", SAVES.format(5), "exit 69"], [True] * 4),
        (["exit 64"], [False]),
    ],
)
def test_starts_that_saved_nothing_new_are_not_repeated(job, tmp_path, starts, queued):
    found = [job(command) for command in starts]
    assert [each[2] for each in found] == queued, found
    if queued[-1] is False:
        assert not [*tmp_path.glob("w/.fruitless*")]
    if len(starts) > 1 and not queued[-1]:
        assert "3 starts in a row saved nothing new" in found[-1][1]


def test_a_job_that_a_user_cancels_is_not_queued_again(job):
    code, printed, is_queued = job("exit 75", state="COMPLETING")
    assert (code, is_queued) == (75, False)
    assert "is not queued again: JobState=COMPLETING" in printed

"""Runs under a real Slurm of two nodes on this host."""

import ast
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster import slurm
from tests.cluster.test_several import ROOT, assert_same, command, train, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def srun(environ, *flags, **options):
    return subprocess.Popen(
        ["srun", "-N2", "-n2", *flags],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_two_tasks_of_srun_train_as_one_process_with_no_address_given(
    tmp_path, environ
):
    run = srun(environ, *command(tmp_path / "run", 2))
    printed, _ = run.communicate(timeout=250)
    assert run.returncode == 0, printed
    assert "4 x cpu: cpu:0, cpu:1 in process 0 of 2" in printed
    train(1, tmp_path / "alone", 4)
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_of_mpirun_in_an_allocation_have_places_of_their_own(environ, count):
    """The second node's are children of a daemon that srun started."""
    code = "import os; from haiku_template.cluster.detection import detect; "
    code += "print(tuple(detect(os.environ)))"
    ranks = ["--oversubscribe", "-n", str(count), "--map-by", "node"]
    done = subprocess.run(
        ["salloc", "-N2", "-n2", "--overcommit", str(ROOT / "launch/mpi.sh"), *ranks]
        + [sys.executable, "-c", code],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    places = re.findall(r"\([^()]*\)", done.stdout)  # Two may be on one line.
    found = sorted(map(ast.literal_eval, places), key=lambda place: place[3])
    assert [place[3] for place in found] == [*range(count)], done.stdout + done.stderr
    assert {place[:3] for place in found} == {("Open MPI", found[0][1], count)}


def test_a_cancelled_job_saves_and_is_resumed(tmp_path, environ):
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    run = srun(environ, "--job-name=long", *long)
    deadline = time.monotonic() + 250
    while not (workdir / "checkpoints" / "10").is_dir():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.2)
    cancel = ["scancel", "--name=long", f"--signal={signal.SIGTERM.name[3:]}"]
    subprocess.run(cancel, env=environ, check=True)
    printed, _ = run.communicate(timeout=250)
    assert run.returncode == 75, printed
    (step,) = set(re.findall(r"step (\d+) is saved", printed))
    again = srun(
        environ, *command(workdir, 1, num_steps=int(step) + 5, eval_every=None)
    )
    printed, _ = again.communicate(timeout=250)
    assert again.returncode == 0, printed
    assert f"resumed at step {step}" in printed


def submit(environ, output, *command):
    """Submits launch/slurm.sbatch as users do, for nodes that have no cards."""
    options = ["--gpus-per-node=0", "--cpus-per-task=1", f"--output={output}"]
    environ = environ | {"JAX_COMPILATION_CACHE_DIR": str(output.parent / "compiled")}
    done = subprocess.run(
        ["sbatch", "--parsable", *options, str(ROOT / "launch/slurm.sbatch"), *command],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def job(environ, number):
    """Fields of a job, as scontrol shows them."""
    command = ["scontrol", "--oneliner", "show", "job", number]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True)
    return dict(re.findall(r"(\w+)=(\S+)", shown.stdout))


def wait_for_job(environ, number, output, seconds=100, **fields):
    """Waits, but not the two minutes of a job that is queued again."""
    deadline = time.monotonic() + seconds
    while not fields.items() <= (now := job(environ, number)).items():
        if (now["JobState"], now["Reason"]) == ("PENDING", "BeginTime"):
            time.sleep(4)  # Slurm refuses its first start's credential for a moment.
            start = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
            subprocess.run(start, env=environ, capture_output=True)
            time.sleep(2)
        assert time.monotonic() < deadline, f"{now}\n{output.read_text()}"
        time.sleep(0.2)


def cancel(environ, number, *flags):
    subprocess.run(["scancel", *flags, number], env=environ, check=True)


def test_a_preempted_job_is_queued_again_and_ends_its_run(tmp_path, environ):
    workdir, output = tmp_path / "run", tmp_path / "out"
    changes = {"num_steps": 2000, "save_every": 100, "log_every": 100}
    number = submit(environ, output, *command(workdir, 1, eval_every=None, **changes))
    wait_for(lambda: (workdir / "checkpoints" / "100").is_dir())
    cancel(environ, number, "--signal=TERM")
    done = {"JobState": "COMPLETED", "Restarts": "1"}
    wait_for_job(environ, number, output, seconds=250, **done)
    printed = output.read_text()
    (step,) = set(re.findall(r"step (\d+) is saved", printed))
    assert f"job {number} ended with 75: restart 1" in printed
    assert f"resumed at step {step}" in printed and int(step) < 2000
    assert (workdir / "checkpoints" / "2000").is_dir()


# The first start ends with what is given, the second well.
ONCE = '[ -n "$SLURM_RESTART_COUNT" ] && exit 0; [ $SLURM_PROCID = 0 ] && '


@pytest.mark.parametrize(
    ("script", "code", "shown"),
    [
        # The other needs its time to notice.
        ("sleep 3 && exit 69; kill -9 $$", 137, 69),
        ("exit 69; exit 69", 69, 69),
        ("exit 71; exit 71", 71, 71),
    ],
)
def test_a_job_that_lost_a_process_is_queued_again(
    tmp_path, environ, script, code, shown
):
    output = tmp_path / "out"
    number = submit(environ, output, "bash", "-c", ONCE + script)
    wait_for_job(environ, number, output, JobState="COMPLETED", Restarts="1")
    assert f"job {number} ended with {code}: restart 1" in output.read_text()
    assert f"Exited with exit code {shown}" in output.read_text()


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({}, 64, "64\n"),
        ({}, 70, "70\n"),
        (
            {"MOST_FRUITLESS": "1"},
            69,
            "69, and is not queued again: 1 starts in a row saved nothing new\n",
        ),
    ],
)
def test_a_job_that_would_end_the_same_way_ends(
    tmp_path, environ, variables, code, words
):
    output = tmp_path / "out"
    number = submit(environ | variables, output, "bash", "-c", f"exit {code}")
    wait_for_job(environ, number, output, JobState="FAILED", ExitCode=f"{code}:0")
    assert output.read_text().endswith(f"job {number} ended with {words}")


def test_starts_that_save_nothing_new_end_the_job_and_preempted_ones_do_not(
    tmp_path, environ
):
    """The first is preempted, the second saves, and the third and fourth do nothing."""
    output, workdir = tmp_path / "out", tmp_path / "run"
    script = "case $SLURM_RESTART_COUNT in '') exit 75;; 1) mkdir -p $1; esac; exit 69"
    words = ["bash", "-c", script, "run", str(workdir / "checkpoints/10")]
    variables = environ | {"MOST_FRUITLESS": "2"}
    number = submit(variables, output, *words, f"--workdir={workdir}")
    ends = {"JobState": "FAILED", "Restarts": "3"}
    wait_for_job(environ, number, output, seconds=200, **ends)
    printed = output.read_text()
    assert [x in printed for x in ("restart 1", "restart 2", "restart 3")] == [True] * 3
    assert "69, and is not queued again: 2 starts in a row saved nothing new" in printed
    assert not [*workdir.glob(".fruitless*")]


def test_a_job_that_a_user_cancels_saves_and_stays_away(tmp_path, environ):
    output = tmp_path / "out"
    # As a run: it saves for a while.
    script = "trap 'sleep 2; exit 75' TERM; touch $0; while :; do sleep 0.1; done"
    number = submit(environ, output, "bash", "-c", script, str(tmp_path / "here"))
    wait_for((tmp_path / "here").exists)
    cancel(environ, number)
    wait_for_job(environ, number, output, JobState="CANCELLED", Restarts="0")
    words = f"job {number} ended with 75, and is not queued again: JobState=COMPLETING"
    wait_for(lambda: words in output.read_text(), seconds=20)

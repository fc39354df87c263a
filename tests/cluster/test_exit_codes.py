"""Exit codes: what launchers start again, and the page, go by one table."""

import re
import subprocess

import pytest

from haiku_template import errors, signals
from tests.cluster.test_jobset import JOB
from tests.cluster.test_local import local
from tests.runs import MAY_RESTART, ROOT

ASKED = {75, 130}  # Somebody asked for this end: a launcher of one machine obeys.


def test_every_exit_code_of_the_package_is_in_the_table():
    codes = {x.exit_code for x in vars(errors).values() if hasattr(x, "exit_code")}
    codes |= {signals.STALLED, *signals.EXIT_CODES.values()}
    assert codes == MAY_RESTART.keys() - {0, 1, 137}


def test_the_page_has_the_table():
    text = (ROOT / "docs/running.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| (yes|no) \|$", text, re.M)
    assert {int(code): again == "yes" for code, again in rows} == MAY_RESTART


def test_the_launcher_of_one_machine_goes_by_the_table():
    again = {code: local.can_mend(code) for code in MAY_RESTART}
    assert again == MAY_RESTART | dict.fromkeys(ASKED, False)


def test_a_job_of_slurm_goes_by_the_table():
    text = (ROOT / "launch/slurm.sbatch").read_text()
    (codes,) = re.findall(r'^AGAIN="[\d ]+"', text, re.M)
    (ends,) = re.findall(r"^if (\[\[ .* <= 130\)\)); then$", text, re.M)
    script = f"{codes}; for code in $@; do {ends} || echo $code; done"
    command = ["bash", "-c", script, "bash", *map(str, MAY_RESTART)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {*map(int, done.stdout.split())} == {k for k, x in MAY_RESTART.items() if x}


def test_a_jobset_goes_by_the_table():
    (rule,) = JOB["podFailurePolicy"]["rules"]
    final = {code for code, again in MAY_RESTART.items() if not again}
    assert {*rule["onExitCodes"]["values"]} == final - {0, 130}


@pytest.mark.parametrize(
    ("fruitless", "ages", "reason"),
    [
        (2, [], ""),
        (3, [], "3 starts in a row saved nothing new"),
        (0, [1.0] * 2, ""),
        (0, [1.0] * 3, "--restarts=3 within an hour"),
    ],
)
def test_a_crash_loop_ends_with_its_reason(fruitless, ages, reason):
    """C46, with `test_starts_that_save_nothing_new_are_not_repeated`."""
    assert local.why_not(fruitless, ages, 3) == reason

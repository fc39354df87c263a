"""Every way in which one process can leave, while another waits for it."""

import re
import subprocess
import sys

import pytest

from tests.cluster.test_several import ENVIRONMENT

pytestmark = pytest.mark.cluster
SCRIPT = """
import os, signal, sys
from haiku_template import cli


class Own(BaseException):
    pass


def main():
    devices = cli.device_manager()
    devices.processes.agree({{"step": 0}})
    if devices.processes.index in {who}:
        {ending}
    devices.processes.agree({{"step": 1}})


cli.run(main)
"""
# What process 1 does; exit codes of both; what process 0 says.
ENDED = r"process 1 on \S+ ended at [\d:]{8}: "
KILLED = r"process 1 on \S+ was killed at [\d:]{8}"
EARLY = r"process 1 on \S+ finished at [\d:]{8}, and process 0 waits for it: it return"
ENDS = {
    "sys.exit()": ([69, 0], ENDED + "SystemExit: None"),
    "sys.exit(0)": ([69, 0], ENDED + "SystemExit: 0"),
    "sys.exit(3)": ([69, 3], ENDED + "SystemExit: 3"),
    "sys.exit(64)": ([64, 64], ENDED + "SystemExit: 64"),
    "sys.exit('no shard 17')": ([69, 1], ENDED + "SystemExit: no shard 17"),
    "os._exit(0)": ([69, 0], KILLED),
    "os._exit(3)": ([69, 3], KILLED),
    "os.abort()": ([69, -6], KILLED),
    "raise KeyboardInterrupt": ([69, 130], ENDED + "interrupted before"),
    "raise GeneratorExit": ([69, 1], ENDED + "GeneratorExit:"),
    "raise Own('mine')": ([69, 1], ENDED + "Own: mine"),
    "raise LookupError('x')": ([69, 1], ENDED + "LookupError: x"),
    "return": ([69, 69], EARLY),
}


def runs(folder, address, ending, who="(1,)"):
    """Exit codes and errors of two processes."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(ending=ending, who=who))
    flags = ["--num_processes=2", f"--coordinator_address={address}", "--device=cpu"]
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *flags, f"--process_id={index}"],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        errors = [run.communicate(timeout=100)[1] for run in started]
    finally:
        for run in started:
            run.kill()
    return [run.returncode for run in started], errors


@pytest.mark.parametrize("ending", ENDS)
def test_one_that_leaves_ends_the_other_in_a_sentence(tmp_path, address, ending):
    expected, words = ENDS[ending]
    codes, errors = runs(tmp_path, address, ending)
    assert codes == expected, errors
    assert re.match(f"error: {words}", errors[0]), errors
    assert errors[0].count("\n") == 1
    if "shard" in ending:
        assert errors[1] == "no shard 17\n"


@pytest.mark.parametrize("code", [0, 3])
def test_all_that_leave_have_their_own_code(tmp_path, address, code):
    codes, errors = runs(tmp_path, address, f"sys.exit({code})", who="(0, 1)")
    assert codes == [code, code], errors


NCCL = "INTERNAL: NCCL operation ncclCommInitRankConfig failed: unhandled system error"


def test_collectives_that_fail_with_all_processes_there_are_no_lost_process(
    tmp_path, address
):
    raised = f"raise RuntimeError({NCCL!r})"
    codes, errors = runs(tmp_path, address, raised, who="(0, 1)")
    assert codes == [64, 64], errors
    for error in errors:
        assert "collectives failed here, and no process is lost: INTERNAL: N" in error
        assert "is gone" not in error and "the same command" not in error

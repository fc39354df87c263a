"""The watchdog of one of two processes that hangs: both end, and it names itself."""

import re
import signal
import subprocess
import time

import pytest

from tests.cluster.test_moments import ENDED, run
from tests.cluster.test_several import ENVIRONMENT, by_hand, command, wait_for

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_hangs_says_so_with_its_stacks(tmp_path, address, index):
    """C18: the other waits in a collective, and is not the one that is blamed."""
    options = {"num_steps": 100_000, "eval_every": None, "watchdog_minutes": 0.1}
    codes, errors = run(tmp_path, address, f"{index}:save:600", **options)
    assert codes[index] == 76 and codes[1 - index] == 69, errors
    hung = (
        r"no progress for \d+ s in a save, config.watchdog_minutes is 0.1: the stacks"
    )
    assert re.match(f"error: {hung}", errors[index]), errors
    assert re.match(ENDED.format(index, hung), errors[1 - index]), errors
    assert not any("Traceback" in words for words in errors)
    folder = tmp_path / "run" / (f"processes/{index}" if index else "")
    assert "in fault" in (folder / "stacks.txt").read_text()


@pytest.mark.parametrize("both", [True, False])
def test_a_second_signal_ends_all_though_one_hangs(tmp_path, address, both):
    """C14: in its save, after the first; the checkpoint before is whole."""
    changes = {"num_steps": 100_000, "eval_every": None}
    whole = command(tmp_path / "run", 1, **changes)
    whole[whole.index("tests.cluster.guarded")] = "tests.cluster.faulty"
    faulty = ENVIRONMENT | {"FAULTS": "1:save:600"}
    runs = by_hand(address, whole, whole, env=faulty, stdout=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "run/checkpoints/10/commit_success.txt").exists)
        time.sleep(5)
        for _ in range(2):
            for each in runs if both else runs[:1]:
                each.send_signal(signal.SIGTERM)
            time.sleep(1.5)
        errors = [each.communicate(timeout=40)[1] for each in runs]
    finally:
        for each in runs:
            each.kill()
    assert [each.returncode for each in runs] == [75, 75], errors
    assert "SIGTERM received again: what was not saved by then is lost" in errors[0]
    assert not any("Traceback" in words for words in errors)

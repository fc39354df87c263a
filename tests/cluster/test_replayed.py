"""Replay in two processes: a bit that one of them flips once is found, and named."""

import subprocess

import pytest

from haiku_template.errors import ReplayError
from tests.cluster.test_several import ENVIRONMENT, by_hand, command

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("sharding", ["()", "(('*','data'),)"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_flipped_bit_of_one_process_is_found_before_the_next_save(
    tmp_path, address, index, sharding
):
    """Steps 1 to 4 take a call of one step, and the fifth two or three."""
    changes = {"sdc_replay": "every:5", "steps_per_call": 1, "sharding": sharding}
    changes |= {"save_every": 3, "eval_every": None}
    whole = command(tmp_path / "run", 2, **changes)
    whole[whole.index("tests.cluster.guarded")] = "tests.cluster.flipping"
    flipped = ENVIRONMENT | {"FLIPPED": f"{index}:5"}
    runs = by_hand(address, whole, whole, env=flipped, stdout=subprocess.DEVNULL)
    try:
        errors = [x.communicate(timeout=200)[1] for x in runs]
    finally:
        for x in runs:
            x.kill()
    assert [x.returncode for x in runs] == [ReplayError.exit_code] * 2, errors
    for text in errors:
        assert "step 5 was made twice" in text and "params" in text, text
        said = "cpu:{} in process {} computed wrongly 1 of 3 times"
        assert all(said.format(device, index) in text for device in (0, 1)), text
        assert said.format(0, 1 - index) not in text
    steps = {x.name for x in (tmp_path / "run/checkpoints").iterdir()}
    assert steps == {"3"}

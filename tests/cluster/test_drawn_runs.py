"""Whole runs of random configurations by two processes, against the oracle of one."""

import pytest

from tests.oracle.compare import disagreements
from tests.oracle.draw import SHAPES, draw, further

pytestmark = pytest.mark.cluster
CASES = {seed: draw(seed, processes=2) for seed in (3, 4, 24, 41, 95, 98)}
# What one of them has at least: another draw may need other seeds.
COVERED = {
    "a sharded state": lambda case: case["config"]["sharding"] == (("*", "data"),),
    "sharded moments": lambda case: case["config"]["sharding"][:1] == MOMENTS,
    "accumulation": lambda case: case["config"]["accumulate_steps"] > 1,
    "several sets to evaluate": further,
    "batches of several shapes": lambda case: case["kind"] in SHAPES,
    "averages": lambda case: "ema_decay" in case["config"],
    "float16": lambda case: case["config"].get("precision") == "float16",
    "steps that are left out": lambda case: case["left_out"],
    "kill -9": lambda case: stop_of(case)[1:] == ("SIGKILL",),
    "SIGTERM to process 1": lambda case: stop_of(case) == (1, "SIGTERM"),
    "SIGTERM to the launcher": lambda case: stop_of(case) == ("all", "SIGTERM"),
    "one process, then two": lambda case: case["processes"] == (1, 2),
    "two processes, then one": lambda case: case["processes"] == (2, 1),
    "two devices of each": lambda case: case["devices"] == 4,
}
MOMENTS = (("opt_state/*", "data"),)


def stop_of(case):
    """How a start of two processes is stopped; () for none."""
    stops = case["processes"][0] == 2 and case["stops_at"] and not case["extends"]
    return case["halt"] if stops else ()


@pytest.mark.parametrize("name", COVERED)
def test_one_of_the_seeds_has(name):
    assert any(map(COVERED[name], CASES.values()))


@pytest.mark.timeout(3600)  # Of up to three starts, each with a limit of its own.
@pytest.mark.parametrize("seed", CASES)
def test_a_run_of_two_processes_agrees_with_the_oracle(seed):
    assert disagreements(CASES[seed]) == []

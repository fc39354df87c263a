"""A few lives; `python -m tests.lifecycle LO HI` tries any number."""

import shutil

import pytest

from configs import digits
from haiku_template.runs import start
from tests.lifecycle.compare import compared
from tests.lifecycle.life import Life

LIVES = [(4, "float16"), (11, "sharded"), (21, "rewound"), (13, "mlp")]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "name"), LIVES)
def test_a_run_ends_as_one_that_nothing_disturbed(tmp_path, seed, name):
    life = Life(seed, tmp_path, name)
    life.live()
    assert not life.faults, "\n".join([*life.told, *life.faults])


def test_what_differs_from_the_undisturbed_run_is_told(tmp_path, one_device):
    """Another seed; then a row too many, one too few, and a file that is left."""
    config, places = digits.get_config(), [tmp_path / "a", tmp_path / "b"]
    config.num_steps, config.log_every, config.optimizer.warmup_steps = 4, 2, 0
    for seed, place in enumerate(places):
        config.seed = seed
        start.run(config, one_device, place)
    faults = compared(*places)
    assert (
        "other bits in 18 of 21" in faults[0] and "metrics of (2, 'train')" in faults[1]
    )
    shutil.copytree(places[0], tmp_path / "c")
    assert compared(places[0], tmp_path / "c") == []
    file = tmp_path / "c/metrics.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[0], *rows[:-1]]))
    (tmp_path / "c/.half").touch()
    told = compared(tmp_path / "c", places[0])
    assert [x.partition(":")[0] for x in told] == [
        "metrics of (2, 'train')",
        "metrics of (4, 'eval')",
        "left over",
    ]

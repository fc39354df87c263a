"""Four properties of each run here; about half a minute on two cores."""

from pathlib import Path

import pytest

from haiku_template import testing

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


@pytest.fixture
def config():
    return testing.load_config(CONFIGS[0])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_builds(path):
    testing.assert_builds(testing.load_config(path))


def test_loss_falls(config, tmp_path):
    testing.assert_loss_falls(config, tmp_path)


def test_four_devices_equal_one(config, tmp_path):
    testing.assert_devices_agree(config, tmp_path)


def test_stopped_and_resumed_is_bitwise(config, tmp_path):
    testing.assert_resumes_bitwise(config, tmp_path)

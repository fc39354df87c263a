"""Sizes that would be worked on for ever are refused first."""

import pytest

from configs import digits, gpt_bytes
from haiku_template.errors import ConfigError
from haiku_template.training.experiment import make_model


def test_layers_that_are_no_number_are_the_models_to_refuse():
    config = digits.get_config()
    config.model.blocks = (3, 4)
    with pytest.raises(ConfigError, match="mlp got an unexpected keyword .*'blocks'"):
        make_model(config, 10)


@pytest.mark.parametrize("module", [digits, gpt_bytes])
def test_more_layers_than_can_be_traced_are_refused_at_once(module):
    config = module.get_config()
    config.model.num_layers = 10**9
    with pytest.raises(ConfigError, match="num_layers=1000000000; possible is up to"):
        make_model(config, 10)

"""Functions of a user's are asked what they take as they are called."""

import functools

import pytest

from haiku_template.errors import ConfigError
from haiku_template.registry import check_takes


def test_a_decorator_that_gives_arguments_of_its_own_is_no_fault():
    @functools.wraps(lambda model, outputs: None)
    def decorated(outputs):
        return None

    check_takes("it", decorated, "outputs")


def test_what_is_no_function_is_a_sentence():
    with pytest.raises(ConfigError, match="it is None, and a function is needed"):
        check_takes("it", None)

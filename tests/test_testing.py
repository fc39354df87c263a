"""The assertions for projects' tests: each fails for what it is there to find."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template import testing
from haiku_template.config import default_config
from haiku_template.data import Split, from_split
from haiku_template.errors import ConfigError
from haiku_template.runs.trial import check_run

HERE = "tests.test_testing"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def data(spec):
    return from_split(Split(X, Y, X[:20], Y[:20]), spec, num_classes=2)


def data_that_drifts(spec):
    calls = iter(range(10_000))
    made = data(spec)

    class Drifting:
        def batch(self, step):
            return made.train.batch(next(calls))

    return made._replace(train=Drifting())


def model(num_outputs, axis_name, rate=0.0):
    def forward(inputs, is_training):
        x = jax.nn.relu(hk.Linear(8)(inputs))
        if is_training and rate:
            x = hk.dropout(hk.next_rng_key(), rate, x)
        return hk.Linear(num_outputs)(x)

    return hk.transform(forward)


def task_of_one_number(outputs, batch):
    return {"loss": jnp.mean(outputs) + 0 * batch["labels"].sum()}


def task_without_outputs(outputs, batch):
    return {"loss": (batch["labels"] + 0 * outputs[:, 0]).astype(jnp.float32)}


def config(**names):
    values = default_config()
    values.batch_size = 16
    values.num_steps = 100
    values.optimizer.warmup_steps = 50  # Longer than the runs of tests.
    values.model = {"name": f"{HERE}:model", "rate": names.pop("rate", 0.0)}
    values.data = {"name": f"{HERE}:{names.pop('data', 'data')}"}
    if names:
        values.task = {"name": f"{HERE}:{names.pop('task')}"}
    return values


@pytest.mark.slow
def test_a_config_that_is_right_passes_all_four(tmp_path):
    right = config()
    testing.simulate_devices()
    testing.assert_builds(right)
    testing.assert_loss_falls(right, tmp_path / "falls")
    testing.assert_devices_agree(right, tmp_path / "devices")
    testing.assert_resumes_bitwise(right, tmp_path / "resumes")
    assert right == config()


def test_a_config_file_is_read_and_checked(tmp_path):
    file = tmp_path / "mine.py"
    text = "from haiku_template.config import default_config\n"
    text += "def get_config():\n    c = default_config()\n    {}\n    return c\n"
    file.write_text(text.format("c.num_steps = 7"))
    assert testing.load_config(file).num_steps == 7
    file.write_text(text.format("c.num_steps = 0"))
    with pytest.raises(ConfigError, match="num_steps=0"):
        testing.load_config(file)


def test_a_config_may_leave_out_the_warmup(tmp_path):
    values = config()
    del values.optimizer.warmup_steps
    _, rows = testing._train(values, tmp_path, 2)
    assert rows[-1]["step"] == 2


def test_parts_that_do_not_fit_do_not_build():
    with pytest.raises(ConfigError, match="one number for 16 examples"):
        testing.assert_builds(config(task="task_of_one_number"))


def test_a_loss_that_does_not_depend_on_the_outputs_does_not_fall(tmp_path):
    with pytest.raises(AssertionError, match="shown 20 times went from"):
        testing.assert_loss_falls(config(task="task_without_outputs"), tmp_path)


@pytest.mark.slow
def test_the_loop_that_the_config_names_is_the_one_that_is_tested(tmp_path):
    own = config()
    own.loop = "tests.loop_that_forgets"
    testing.assert_loss_falls(own, tmp_path / "falls")
    with pytest.raises(AssertionError, match="differs after a run that was stopped"):
        testing.assert_resumes_bitwise(own, tmp_path / "resumes")
    with pytest.raises(RuntimeError, match="21 steps are too many for it"):
        check_run(own, testing._devices(1))


@pytest.mark.slow
def test_dropout_differs_between_devices(tmp_path):
    with pytest.raises(AssertionError, match="on one device and .* on 4.*dropout"):
        testing.assert_devices_agree(config(rate=0.5), tmp_path)


def test_data_that_is_no_function_of_the_step_does_not_resume(tmp_path):
    with pytest.raises(AssertionError, match="stopped and resumed: is batch"):
        testing.assert_resumes_bitwise(config(data="data_that_drifts"), tmp_path)

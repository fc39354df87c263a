"""A device whose memory is full after all: XLA's own error, in a real run."""

import json
import re

from jax.errors import JaxRuntimeError

from haiku_template import cli
from haiku_template.errors import MemoryFullError, is_exhausted
from tests.runs import MAY_RESTART, ROOT, run_command

# 16 TiB for a batch of 128, 8 MiB for a micro-batch of one.
MODEL = """
import haiku as hk, jax, jax.numpy as jnp
from configs import digits

def huge(num_outputs, axis_name):
    def forward(inputs, is_training):
        x = hk.Flatten()(inputs)
        if is_training:
            size = 4 * [x.shape[0]]
            size[3] = 2**21
            y = jnp.cumsum(jnp.broadcast_to(x[0, 0], size), 3)
            x = x + 1e-30 * jax.lax.stop_gradient(y.max())
        return hk.nets.MLP([64, num_outputs])(x)
    return hk.transform(forward)

def get_config():
    config = digits.get_config()
    config.model = {"name": "huge:huge"}
    config.steps_per_call, config.num_steps = 1, 2
    return config
"""


def test_a_run_without_memory_says_what_was_there_and_what_would_fit(tmp_path):
    (tmp_path / "huge.py").write_text(MODEL)
    flags = ["--config=huge.py", "--workdir=run", "--device=cpu"]
    path = f"{tmp_path}:{ROOT}"
    done = run_command("train", *flags, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == MemoryFullError.exit_code, done.stderr
    assert not MAY_RESTART[done.returncode] and "Traceback" not in done.stderr
    words = done.stderr
    assert "RESOURCE_EXHAUSTED: Out of memory allocating" in words
    assert "the budget expected" in words and "TiB on each device" in words
    assert ".params['mlp/~/linear_0']['w']" in done.stdout
    (count,) = re.findall(r"--config\.accumulate_steps=(\d+) would need \d", words)
    assert 128 % int(count) == 0 and int(count) > 1
    rows = (tmp_path / "run/goodput.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["code"] == MemoryFullError.exit_code


def test_other_errors_are_left_as_they_are():
    assert is_exhausted(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not is_exhausted(JaxRuntimeError("INTERNAL: a kernel"))
    assert not is_exhausted(MemoryFullError("RESOURCE_EXHAUSTED, said already"))
    # As gRPC says that a bucket was read too often, which may pass.
    assert not is_exhausted(RuntimeError("status = StatusCode.RESOURCE_EXHAUSTED"))


def test_memory_that_is_full_outside_a_run_is_a_sentence_with_its_code():
    full = JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nframes")
    error = cli._of_a_user(full)
    assert error.exit_code == 77 and str(error).endswith("EXHAUSTED: Out of memory")
    assert cli._of_a_user(JaxRuntimeError("INTERNAL: a kernel")) is None
    try:
        raise full
    except JaxRuntimeError:
        words = str(cli._of_a_user(full))
    assert re.search(r"memory \(\S+test_exhausted\.py, line \d+: raise full\)$", words)

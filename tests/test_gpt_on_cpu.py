"""The benchmark of a GPT on CPUs: its peers train the same model, and it runs."""

import haiku as hk
import jax
import numpy as np
import pytest

from benchmarks import gpt_on_cpu
from configs import gpt_bytes
from haiku_text.models import gpt


def test_bare_haiku_s_model_has_the_parameters_of_the_config_s():
    sizes = gpt_bytes.get_config().model.to_dict()
    del sizes["name"]
    tokens = np.zeros((gpt_on_cpu.BATCH_SIZE, gpt_on_cpu.CONTEXT), np.int32)
    bare = hk.transform(gpt_on_cpu._bare_loss)
    ours = gpt(gpt_on_cpu.VOCABULARY, **sizes)

    def shapes(init):
        params = jax.eval_shape(init, jax.random.key(0))
        return sorted(x.shape for x in jax.tree.leaves(params))

    expected = shapes(lambda rng: ours.init(rng, tokens, False))
    assert shapes(lambda rng: bare.init(rng, tokens, tokens)) == expected


class Peer(gpt_on_cpu.Peer):
    """One that takes the times it is told to."""

    def __init__(self, *times):
        self.versions, self.times = "1.0", list(times)

    def run(self, steps):
        return self.times.pop(0)


def test_speed_is_the_median_ratio_of_rounds_to_the_first_peer(capsys):
    first = Peer((10.0, 10.0), (20.0, 20.0), (60.0, 40.0))
    second = Peer((5.0, 20.0), (5.0, 10.0), (60.0, 10.0))
    gpt_on_cpu.race({"first": first, "second": second}, rounds=3, steps=1)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("3 rounds of 1 steps in turns; load ")
    assert "wall   20.0 ms (10.0-60.0)  speed 1.00" in rows[0]
    assert "wall    5.0 ms (5.0-60.0)  speed 2.00" in rows[1]
    assert "CPU   10.0 ms (10.0-20.0)  speed 2.00" in rows[1]


@pytest.mark.slow
def test_kernels_of_the_step_are_written_by_kind(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt_on_cpu, "TRACED", 2)
    gpt_on_cpu.trace(tmp_path / "kernels.txt")
    total, *kernels = (tmp_path / "kernels.txt").read_text().splitlines()
    assert total.endswith("kernels") and any(" dot" in line for line in kernels)

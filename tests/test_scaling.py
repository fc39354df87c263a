"""The table of docs/scaling.md: what it is computed from, and that it is there."""

import math
import re
import shlex

import pytest

from benchmarks.scaling import (
    NETWORKS,
    NODE,
    NVLINK,
    REACHED,
    Gradients,
    all_reduce_seconds,
    efficiencies,
    main,
)
from tests.runs import ROOT

ETHERNET = NETWORKS["25 GbE"]
PAGE = (ROOT / "docs/scaling.md").read_text()
COMMANDS = re.findall(r"^    python -m \S+ (.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_shows_what_its_commands_print(command, monkeypatch, capsys):
    arguments = shlex.split(command.replace("\\\n", " "))
    monkeypatch.setattr("sys.argv", ["scaling", *arguments])
    main()
    assert capsys.readouterr().out in PAGE


def test_the_page_has_commands():
    assert len(COMMANDS) == 2


def test_one_gpu_sends_nothing():
    assert all_reduce_seconds(1, Gradients(4e9), ETHERNET) == 0
    assert efficiencies(0.1, 0) == (1, 1)


def test_many_bytes_take_as_long_as_the_slowest_hop_lets_them():
    for gpus, slowest in ((8, NVLINK), (64, ETHERNET)):
        seconds = all_reduce_seconds(gpus, Gradients(1e12), ETHERNET)
        ideal = 2 * (gpus - 1) / gpus * 1e12 / (REACHED * slowest)
        assert seconds == pytest.approx(ideal, rel=1e-3)


def test_few_bytes_take_hops_that_grow_with_the_logarithm_of_nodes():
    times = [all_reduce_seconds(n, Gradients(4), ETHERNET) for n in (16, 32, 64)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-3)


def test_several_all_reduces_start_one_after_another():
    whole, parts, first = (
        all_reduce_seconds(64, gradients, ETHERNET)
        for gradients in (Gradients(4e6), Gradients(4e6, 10), Gradients(4))
    )
    assert parts >= whole + first


@pytest.mark.parametrize("gpus", [2, NODE, 16, 1024])
def test_half_of_the_bytes_never_take_longer(gpus):
    for network in NETWORKS.values():
        whole, half = (
            all_reduce_seconds(gpus, Gradients(size), network) for size in (4e8, 2e8)
        )
        assert whole / 2 <= half < whole


def test_what_is_hidden_is_at_most_the_last_backward_pass():
    plain, hidden = efficiencies(0.3, 0.1, accumulate=1)
    assert math.isclose(plain, 0.75) and math.isclose(hidden, 1)
    plain, hidden = efficiencies(0.3, 0.1, accumulate=4)
    assert math.isclose(plain, 0.75) and math.isclose(hidden, 0.3 / 0.35)

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from haiku_template.devices import audit_table, device_put_replicated

PATH = "['opt_state'][0]['mu']['mlp/~/linear_0']['w']"
STACKED = "a stacked copy, one entry a device: use devices.replicate, which adds no "


def printed(rows, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(audit_table(rows))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture
def rows(four_devices):
    wide = {"mu": {"mlp/~/linear_0": {"w": np.ones((64, 4096), np.float32)}}}
    stacked = np.ones((3, 2), np.float32)
    tree = {
        "batch": np.float64(1),
        "net_state": [device_put_replicated(stacked, four_devices.devices)] * 2,
        "opt_state": four_devices.replicate([wide]),
        "step": jax.device_put(np.int32(0), four_devices.devices[1]),
    }
    return four_devices.audit(tree)


@pytest.mark.parametrize("width", [80, 120])
def test_says_everything_in_its_width(rows, width):
    lines = printed(rows, width)
    assert max(map(len, lines)) <= width
    words = [line.split() for line in lines]
    assert [PATH, "64x4096", "float32", "1,048,576"] in words
    assert ["['net_state'][0]", "4x3x2", "float32", "24"] in words
    assert ["['step']", "scalar", "int32", "4"] in words
    assert ["['batch']", "scalar", "float64", "8"] in words
    text = " ".join(" ".join(lines).split())
    for row in rows:
        assert (row.verdict or "verdict ok") in text
        assert f"where {row.where}" in text
    assert "where cpu:0-3 replicated; committed; memory kind device" in text
    assert "where host (NumPy) verdict" in text  # Neither committed nor of a kind.


def test_leaves_that_live_alike_share_a_verdict_and_faults_come_last(rows):
    text = "\n".join(printed(rows, 120))
    assert text.count(STACKED) == 1
    at = [text.index(part) for part in ("verdict ok", "(NumPy): put it", STACKED)]
    assert at == sorted(at)


def test_an_uncommitted_leaf_is_called_that(one_device):
    lines = printed(one_device.audit(jax.numpy.ones(3)), 80)
    assert lines[0] == "where   cpu:0; uncommitted; memory kind device"


def test_brackets_in_names_are_no_markup(one_device):
    rows = one_device.audit({"[bold]w[/bold]": one_device.replicate(np.ones(3))})
    assert any("['[bold]w[/bold]']" in line for line in printed(rows, 80))


def test_an_empty_tree_prints_nothing(one_device):
    assert printed(one_device.audit({}), 80) == []

"""Reading a gigabyte holds little more than the parameters in memory."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[2]
# One tensor of 307 MB, and twenty of 34 MB that are transposed.
SHAPES = {"embed": (75_000, 1024)} | {f"w{i}": (1024, 8192) for i in range(20)}
CHILD = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
from haiku_template.devices import DeviceManager
from haiku_template.models import Rule
from haiku_text.huggingface import restore

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+) kB", text)[1]) * 1024

def init():
    matrices = {f"w{i}": jnp.zeros((8192, 1024), sys.argv[2]) for i in range(20)}
    return {"a": {"embed": jnp.zeros((75_000, 1024), sys.argv[2])}, "b": matrices}

rules = [Rule("embed", "a/embed"), Rule("w{}", "b/w{}", "transpose")]
devices = DeviceManager.create("cpu", num_devices=1)
jax.block_until_ready(devices.replicate(np.ones(3)))
before = status("VmRSS")
params = restore(sys.argv[1], init, rules, devices)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print((status("VmHWM") - before - size) / 1e6, size / 1e6)
"""
OF_OTHERS = CHILD.replace(
    "params = restore(sys.argv[1], init, rules, devices)",
    """
def init():
    return {f"net/w{i}": {"w": jnp.zeros((1024, 8192), sys.argv[2])} for i in range(20)}
params = open_source(sys.argv[1], None, devices)(devices.abstract(init), (), None)[0]
""",
)
# What is imported is no memory of reading.
OF_OTHERS = OF_OTHERS.replace(
    "from haiku_text.huggingface import restore",
    "from haiku_template.finetuning import open_source\nimport orbax.checkpoint",
)


def write_large(path):
    """The file without ever holding it: 978 MB of float32."""
    header, first = {}, 0
    for name, shape in SHAPES.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape}
        header[name]["data_offsets"] = [first, first + size]
        first += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = np.random.default_rng(0).random(2**20, np.float32).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while first:
            first -= file.write(block[:first])


def above_parameters(code, path, dtype, size):
    """Megabytes that reading took beside parameters of `size` megabytes."""
    command = [sys.executable, "-c", code, path, dtype]
    options = {"cwd": ROOT, "timeout": 120, "capture_output": True, "text": True}
    printed = subprocess.run(command, check=True, **options).stdout
    above, parameters = map(float, printed.split())
    assert abs(parameters - size) < 1
    return above


@pytest.mark.long
def test_a_gigabyte_is_read_with_little_more_than_its_parameters(tmp_path):
    path = tmp_path / "model.safetensors"
    write_large(path)
    try:
        for dtype, size in (("float32", 978.3), ("bfloat16", 489.1)):
            above = above_parameters(CHILD, path, dtype, size)
            assert above < 150, f"{above} MB above the parameters, for {dtype}"
            # What is read of the file counts here too, twice: 4 MB of it at a time.
            assert above < 50
    finally:
        path.unlink()


def write_archive(path):
    """As NumPy does, an array at a time: 671 MB of float32."""
    block = np.random.default_rng(0).random((1024, 8192), np.float32)
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(20):
            with archive.open(f"net/w{i}//w.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, block)


def write_tree(path):
    block = np.random.default_rng(0).random((1024, 8192), np.float32)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, {f"net/w{i}": {"w": block} for i in range(20)})


@pytest.mark.long
@pytest.mark.parametrize("write", [write_archive, write_tree])
def test_archives_and_trees_are_read_with_little_more_than_a_leaf(tmp_path, write):
    write(tmp_path / "file")
    for dtype, size in (("float32", 671.1), ("bfloat16", 335.5)):
        above = above_parameters(OF_OTHERS, tmp_path / "file", dtype, size)
        # A leaf of Orbax's is one chunk of 34 MB, of which its reader holds a few.
        most = 50 if write is write_archive else 220
        assert above < most, f"{above} MB above the parameters, for {dtype}"
